// Groups of decodes whose sequences begin with the same pages.
//
//   run 3   [ 7 ][ 2 ][ 9 ][ 4 ][ 1 ] ...            the prefix tree gave the same pages to both tables
//   run 5   [ 7 ][ 2 ][ 9 ][ 4 ][ 8 ] ...            (a system prompt, a document, the samples of one request)
//            '---- shared ----'
//
// One row uses a line of K once. Eight rows use it eight times, and the pages come from memory once for all of them.
// The result of a row does not change: it sees the same tiles of pages in the same order, in a group or not.
//
// Each call compares the tables page by page: some thousands of integers, which is little compared with reading the
// pages. Rejected: passing the groups from the scheduler. The tables show them too, and cannot be out of date.
#pragma once

#include <algorithm>
#include <vector>

#include "table.hpp"

namespace weft {
namespace {

constexpr int64_t kSharedStep = 4;   // the pages of an attention tile: tiles keep their borders
constexpr int64_t kSharedPages = 8;  // fewer shared pages do not pay for the grouping

struct Member {
  const Run* run;
  int64_t table_row;
};

struct Group {
  std::vector<Member> members;
  int64_t shared_pages;  // whole tiles, and all of them seen by every member
};

// Returns the decodes in groups of up to ``members_max``. A decode without shared pages is a group with shared_pages 0.
std::vector<Group> groups_of(const AttentionArgs& args, const std::vector<Member>& decodes, int64_t members_max) {
  const auto table = [&](const Member& member) { return args.page_table + member.table_row * args.table_stride; };
  const auto whole_pages = [](const Member& member) { return (member.run->start + 1) / kPageTokens; };
  std::vector<Group> groups;
  std::vector<Member> sharing;
  for (const Member& member : decodes) {
    if (members_max > 1 && !args.window && whole_pages(member) >= kSharedPages) sharing.push_back(member);
    else groups.push_back({{member}, 0});
  }
  std::stable_sort(sharing.begin(), sharing.end(), [&](const Member& one, const Member& other) {
    return table(one)[kSharedPages - 1] < table(other)[kSharedPages - 1];
  });
  for (const Member& member : sharing) {
    Group* group = groups.empty() ? nullptr : &groups.back();
    if (group && group->shared_pages && static_cast<int64_t>(group->members.size()) < members_max) {
      const int64_t most = std::min(group->shared_pages, whole_pages(member));
      const int32_t *ours = table(group->members[0]), *its = table(member);
      const int64_t shared = (std::mismatch(ours, ours + most, its).first - ours) / kSharedStep * kSharedStep;
      // A member may not cost the others half of their shared pages.
      if (shared >= kSharedPages && 2 * shared >= group->shared_pages) {
        group->members.push_back(member);
        group->shared_pages = shared;
        continue;
      }
    }
    groups.push_back({{member}, whole_pages(member) / kSharedStep * kSharedStep});
  }
  for (Group& group : groups)
    if (group.members.size() == 1) group.shared_pages = 0;
  return groups;
}

}  // namespace
}  // namespace weft
