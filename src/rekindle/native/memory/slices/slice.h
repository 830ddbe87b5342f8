// Slices of a storage: which elements one slice of a tensor uses.
#pragma once

#include <cstdint>
#include <optional>

#include "../../torch/geometry.h"

namespace rekindle {

// The elements `e` of a storage with `begin <= e % period < end`. So rows, columns, heads and
// channels of a tensor, and of its transposed and reshaped views, are slices of its storage.
struct Slice final {
    std::int64_t period;
    std::int64_t begin;
    std::int64_t end;

    static Slice whole(std::int64_t n) noexcept { return {n, 0, n}; }

    std::int64_t width() const noexcept { return end - begin; }
};

// Positions `begin <= i < end` on an axis of a tensor.
struct Range final {
    int axis;
    std::int64_t begin;
    std::int64_t end;

    std::int64_t length() const noexcept { return end - begin; }
};

// Return true if the elements of `geometry` fill a storage without gaps, from its start.
bool is_dense(const Geometry& geometry);
// Return the slice, of a storage of `n` elements, that the positions `range` of the view `view`
// use; none if they are no slice.
std::optional<Slice> slice_of(const Geometry& view, const Range& range, std::int64_t n);
// Return the positions of the dense tensor `whole` that make up `slice`; none if they are not
// contiguous on one axis. The axis is negative if `slice` is all of the tensor.
std::optional<Range> range_of(const Geometry& whole, const Slice& slice);
// Return `geometry` with the positions `range` only. An axis of -1 means all.
Geometry narrowed(const Geometry& geometry, const Range& range);
// Return the geometry that `part`, a tensor in a storage of `n` elements of which it uses only
// `slice`, has in a storage that contains that slice alone.
Geometry compacted(const Geometry& part, const Slice& slice);

}  // namespace rekindle
