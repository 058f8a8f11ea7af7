// Additions of adapters to a product: y = x W + (x A) B, for groups of rows, in one call from Python.
//
//     rows        r0  r1  r2  r3        a: rows 0, 3     b: row 2     row 1 is of the base model
//     AdapterRows { 0 3 | 2 }           one for each number of rows in a step, shared by all products
//     AdaptedProduct { a: factors       one for each product, changed when adapters come and go
//                      b: factors }
//
// Factors are float tiles (tiles.hpp) of the dtype of x and y. Their owner in Python keeps them alive.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace weft {

// Rows [first, first + up.out) of a product: y <- (y gain + shift) + low up, of the columns of low from ``begin`` on.
// ``up`` without data: no product. gain, shift: of the dtype of y, or null.
struct FactorPart {
  int64_t first, rows, begin;
  Weight up;
  const void *gain, *shift;
};

struct Factors {
  Weight down;  // without data for parts without a product
  std::vector<FactorPart> parts;
};

class AdaptedProduct {
 public:
  void set(int64_t adapter, Factors factors) {
    erase(adapter);
    by_adapter_.emplace_back(adapter, std::move(factors));
  }
  void erase(int64_t adapter) {
    std::erase_if(by_adapter_, [&](const auto& one) { return one.first == adapter; });
  }
  // Null for an adapter that does not change this product.
  const Factors* find(int64_t adapter) const {
    for (const auto& [number, factors] : by_adapter_)
      if (number == adapter) return &factors;
    return nullptr;
  }
  bool empty() const { return by_adapter_.empty(); }

 private:
  std::vector<std::pair<int64_t, Factors>> by_adapter_;  // about ten entries
};

// ``rows`` by adapter: a group has ``count`` of them from ``begin`` on, in rising order.
struct AdapterRows {
  struct Group {
    int64_t adapter, begin, count;
  };
  std::vector<int64_t> rows;
  std::vector<Group> groups;
};

struct AdaptArgs {
  const void* x;  // [T, in], x_stride apart
  int64_t x_stride;
  void* y;  // [T, out], y_stride apart, in place
  int64_t y_stride;
  Dtype dtype;  // of x, y and all factors
  const AdaptedProduct* product;
  const AdapterRows* whose;
};

}  // namespace weft
