"""Batches: many requests from a file, answered in an order that suits the prefix cache; see docs/batches.md.

    weft batch IN -o OUT    answering.run_file --+
                                               +--> work.run_lines --> answering.answer_line --> one answer
    /v1/batches             routes.BatchRunner --+

``lines`` reads and writes OpenAI's batch lines. ``files`` keeps uploads, results and batches on disk.
"""
