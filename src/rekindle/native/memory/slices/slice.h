// Slices of a storage: which elements one slice of a tensor uses.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

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

// Ranges on different axes of a tensor, with all positions of the other axes. All ranges but the
// last one have a single position. No range: all of the tensor.
using Box = c10::SmallVector<Range, 2>;

// Return true if the elements of `geometry` fill a storage without gaps, from its start.
bool is_dense(const Geometry& geometry);
// Return the slice, of a storage of `n` elements, that the positions `box` of the view `view` use;
// none if they are no slice.
std::optional<Slice> slice_of(const Geometry& view, const Box& box, std::int64_t n);
// Return the axis of the dense tensor `whole` whose positions, all together, are `period` elements
// in the storage; none if there is no such axis.
std::optional<int> axis_of(const Geometry& whole, std::int64_t period);
// Return the boxes of the dense tensor `whole` that together make up `slice`, in the order of their
// elements; none if there are none. Scenario: of a tensor of shape (2, 8, ...), a view of shape
// (16, ...) has the positions 6 to 10. These are two boxes.
std::vector<Box> boxes_of(const Geometry& whole, const Slice& slice);
// Return `geometry` with the positions `box` only.
Geometry narrowed(const Geometry& geometry, const Box& box);
// Return the geometry that `part`, a tensor in a storage of `n` elements of which it uses only
// `slice`, has in a storage that contains that slice alone.
Geometry compacted(const Geometry& part, const Slice& slice);

}  // namespace rekindle
