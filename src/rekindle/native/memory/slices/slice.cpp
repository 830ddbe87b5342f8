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

std::optional<Slice> slice_of(const Geometry& view, const Range& range, std::int64_t n) {
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

std::optional<Range> range_of(const Geometry& whole, const Slice& slice) {
    if (slice.period == whole.numel() && slice.width() == slice.period) {
        return Range{-1, 0, 0};
    }
    // The axis with the smallest stride comes last, so that an axis of size 1 is never chosen.
    for (std::size_t i = 0; i < whole.sizes.size(); ++i) {
        const std::int64_t stride = whole.strides[i];
        if (whole.sizes[i] > 1 && stride * whole.sizes[i] == slice.period) {
            if (slice.begin % stride != 0 || slice.end % stride != 0) {
                return {};
            }
            return Range{static_cast<int>(i), slice.begin / stride, slice.end / stride};
        }
    }
    return {};
}

Geometry narrowed(const Geometry& geometry, const Range& range) {
    Geometry made = geometry;
    if (range.axis >= 0) {
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
