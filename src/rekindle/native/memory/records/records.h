// Where the records and recipes of a budget live, and how they are numbered.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../base/slab.h"
#include "../../base/types.h"
#include "../../engine/graph.h"
#include "recipe.h"
#include "storage_record.h"

namespace rekindle {

// Allocators of storage records and recipes. They outlive the engine, whose destructor returns its
// records and recipes to them. The caller holds the session mutex.
class Records final {
public:
    std::int64_t storages_made = 0;

    // Return the number of operator calls so far.
    OpId operators() const noexcept { return next_op_; }

    Recipe& make_call(Graph& graph, const Facts* facts, Nanoseconds cost, bool replayable) {
        return recipes_.make(graph, next_op_++, cost, replayable, facts);
    }

    StorageRecord& make_storage(Graph& graph, Bytes nbytes) {
        return records_.make(graph, storages_made++, nbytes);
    }

    void drop(StorageRecord& record) noexcept { records_.drop(record); }

    void drop(Recipe& recipe) noexcept { recipes_.drop(recipe); }

    // Return the number of records and recipes that exist.
    std::size_t alive() const noexcept { return records_.alive() + recipes_.alive(); }

    std::size_t nbytes() const noexcept {
        return records_.alive() * sizeof(StorageRecord) + recipes_.alive() * sizeof(Recipe);
    }

private:
    Slab<StorageRecord> records_;
    Slab<Recipe> recipes_;
    OpId next_op_ = 0;
};

}  // namespace rekindle
