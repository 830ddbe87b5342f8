#include "slice.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

namespace rekindle {

bool is_dense(const Geometry& geometry) {
    if (geometry.offset != 0 || geometry.conjugate || geometry.negative) {
        return false;
    }
    std::vector<std::size_t> axes(geometry.sizes.size());
    std::iota(axes.begin(), axes.end(), std::size_t{0});
    std::erase_if(axes, [&](std::size_t axis) { return geometry.sizes[axis] == 1; });
    std::ranges::sort(axes, {}, [&](std::size_t axis) { return geometry.strides[axis]; });
    std::int64_t stride = 1;
    for (const std::size_t axis : axes) {
        if (geometry.strides[axis] != stride) {
            return false;
        }
        stride *= geometry.sizes[axis];
    }
    return stride > 0;
}

namespace {

// Return the slice that the positions `range` of `view` use, of a storage of `n` elements.
std::optional<Slice> slice_of_range(const Geometry& view, const Range& range, std::int64_t n) {
    const auto axis = static_cast<std::size_t>(range.axis);
    const std::int64_t stride = view.strides[axis];
    if (stride <= 0 || view.conjugate || view.negative) {
        return {};
    }
    std::int64_t period = n;
    std::int64_t inside = 0;  // distance of the last element at one position from the first
    for (std::size_t i = 0; i < view.sizes.size(); ++i) {
        if (i == axis || view.sizes[i] == 1) {
            continue;
        }
        if (view.strides[i] >= stride * view.sizes[axis] && view.strides[i] > 0) {
            period = std::min(period, view.strides[i]);
        } else if (view.strides[i] <= stride) {
            inside += view.strides[i] * (view.sizes[i] - 1);
        }
    }
    for (std::size_t i = 0; i < view.sizes.size(); ++i) {
        const bool outside = view.strides[i] >= period;
        const bool fits = view.strides[i] <= stride || (outside && view.strides[i] % period == 0);
        if (i != axis && view.sizes[i] != 1 && !fits) {
            return {};
        }
    }
    const std::int64_t first = view.offset % period;
    const std::int64_t start = first / stride * stride;
    const Slice slice{period, start + range.begin * stride, start + range.end * stride};
    if (first % stride + inside >= stride || slice.end > period || n % period != 0) {
        return {};
    }
    return slice;
}

// Add to `found` the boxes that make up the elements `begin` to `end` of each period of `period`
// elements. `outer` are the positions on the axes outside of this period. Return false if there are
// no such boxes.
// NOLINTNEXTLINE(misc-no-recursion): one level for each axis
bool add_boxes(
    const Geometry& whole, const Slice& slice, const Box& outer, std::vector<Box>& found
) {
    const std::optional<int> axis = axis_of(whole, slice.period);
    if (!axis) {
        return false;
    }
    const std::int64_t stride = whole.strides[static_cast<std::size_t>(*axis)];
    if (slice.begin % stride == 0 && slice.end % stride == 0) {
        found.push_back(outer);
        found.back().push_back({*axis, slice.begin / stride, slice.end / stride});
        return true;
    }
    for (std::int64_t at = slice.begin / stride; at * stride < slice.end; ++at) {
        Box here = outer;
        here.push_back({*axis, at, at + 1});
        const std::int64_t start = at * stride;
        const Slice part{
            stride,
            std::max(slice.begin - start, std::int64_t{0}),
            std::min(slice.end - start, stride)
        };
        if (!add_boxes(whole, part, here, found)) {
            return false;
        }
    }
    return true;
}

}  // namespace

std::optional<Slice> slice_of(const Geometry& view, const Box& box, std::int64_t n) {
    if (box.empty()) {
        return Slice::whole(n);
    }
    return slice_of_range(narrowed(view, Box(box.begin(), box.end() - 1)), box.back(), n);
}

std::optional<int> axis_of(const Geometry& whole, std::int64_t period) {
    for (std::size_t i = 0; i < whole.sizes.size(); ++i) {
        if (whole.sizes[i] > 1 && whole.strides[i] * whole.sizes[i] == period) {
            return static_cast<int>(i);
        }
    }
    return {};
}

std::vector<Box> boxes_of(const Geometry& whole, const Slice& slice) {
    if (slice.period == whole.numel() && slice.width() == slice.period) {
        return {Box()};
    }
    std::vector<Box> found;
    return add_boxes(whole, slice, {}, found) ? found : std::vector<Box>();
}

Geometry narrowed(const Geometry& geometry, const Box& box) {
    Geometry made = geometry;
    for (const Range& range : box) {
        const auto axis = static_cast<std::size_t>(range.axis);
        made.sizes[axis] = range.length();
        made.offset += range.begin * made.strides[axis];
    }
    return made;
}

Geometry compacted(const Geometry& part, const Slice& slice) {
    Geometry made = part;
    for (std::int64_t& stride : made.strides) {
        if (stride >= slice.period) {
            stride = stride / slice.period * slice.width();
        }
    }
    made.offset =
        part.offset / slice.period * slice.width() + part.offset % slice.period - slice.begin;
    return made;
}

}  // namespace rekindle
