#include "unwritten_bytes.h"

#include <algorithm>
#include <array>
#include <utility>

namespace rekindle {

ByteRegion ByteRegion::of(const c10::TensorImpl& tensor) {
    const auto itemsize = static_cast<Bytes>(tensor.itemsize());
    ByteRegion region;
    region.offset = tensor.storage_offset() * itemsize;
    region.is_empty = tensor.numel() == 0;
    const c10::IntArrayRef sizes = tensor.sizes();
    const c10::IntArrayRef strides = tensor.strides();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        region.axes.push_back({strides[i] * itemsize, sizes[i]});
    }
    region.axes.push_back({1, itemsize});
    region.normalize();
    return region;
}

void ByteRegion::normalize() {
    // An expanded axis (step 0) repeats the same bytes.
    const auto last = std::ranges::remove_if(axes, [](const Axis& axis) {
        return axis.count == 1 || axis.step == 0;
    });
    axes.erase(last.begin(), last.end());
    std::ranges::sort(axes, std::ranges::greater(), &Axis::step);
    c10::SmallVector<Axis, 6> merged;
    for (const Axis& axis : axes) {
        if (!merged.empty() && merged.back().step == axis.step * axis.count) {
            merged.back() = {axis.step, merged.back().count * axis.count};
        } else {
            merged.push_back(axis);
        }
    }
    axes = std::move(merged);
}

UnwrittenBytes::UnwrittenBytes(Bytes nbytes) {
    if (nbytes > 0) {
        boxes_.push_back({{0, nbytes}});
    }
}

bool UnwrittenBytes::overlaps(const ByteRegion& region) {
    if (region.is_empty || none()) {
        return false;
    }
    const std::optional<Box> read = box_of(region);
    return !read || std::ranges::any_of(boxes_, [&](const Box& box) {
        return intersection(box, *read).has_value();
    });
}

bool UnwrittenBytes::write(const ByteRegion& region) {
    if (region.is_empty) {
        return true;
    }
    const std::optional<Box> written = box_of(region);
    return !written || become(without(*written));
}

bool UnwrittenBytes::can_copy(const ByteRegion& target, const ByteRegion& source) {
    if (target.is_empty) {
        return true;
    }
    const std::optional<std::array<Box, 2>> boxes = boxes_of(target, source);
    return boxes && !intersection((*boxes)[0], (*boxes)[1]);
}

bool UnwrittenBytes::copy(const ByteRegion& target, const ByteRegion& source) {
    if (target.is_empty) {
        return true;
    }
    const std::optional<std::array<Box, 2>> boxes = boxes_of(target, source);
    if (!boxes) {
        return false;
    }
    const auto& [to, from] = *boxes;
    std::vector<Box> left = without(to);
    for (const Box& box : boxes_) {
        if (std::optional<Box> copied = intersection(box, from)) {
            for (std::size_t i = 0; i < to.size(); ++i) {
                const std::int64_t shift = to[i].first - from[i].first;
                (*copied)[i].first += shift;
                (*copied)[i].end += shift;
            }
            left.push_back(*std::move(copied));
        }
    }
    return become(std::move(left));
}

// Return the boxes of two regions, or nothing if one of the regions is not a box. A box is a range
// of indices for each axis.
std::optional<std::array<UnwrittenBytes::Box, 2>> UnwrittenBytes::boxes_of(
    const ByteRegion& one, const ByteRegion& other
) {
    box_of(other);  // splits the axes, as `box_of(one)` does
    std::optional<Box> first = box_of(one);
    std::optional<Box> second = box_of(other);
    if (!first || !second) {
        return {};
    }
    return std::array<Box, 2>{*std::move(first), *std::move(second)};
}

// Split an axis of the boxes so that there is an axis whose indices lie `step` bytes apart. Return
// false if no axis can be split in this way.
bool UnwrittenBytes::split_axis(Bytes step) {
    const auto* found =
        std::ranges::find_if(steps_, [&](const Bytes each) { return each <= step; });
    if (found == steps_.end()) {
        return false;
    }
    if (*found == step) {
        return true;
    }
    const auto at = static_cast<std::size_t>(found - steps_.begin());
    // `step` must be a multiple of the step of this axis, and must divide the step of the next
    // larger axis. The first axis has no larger one: it may end anywhere.
    if (step % steps_[at] != 0 || (at != 0 && steps_[at - 1] % step != 0)) {
        return false;
    }
    const std::int64_t length = step / steps_[at];
    std::vector<Box> split;
    const auto add = [&](const Box& box, Range outer, Range inner) {
        if (outer.first < outer.end && inner.first < inner.end) {
            Box made = box;
            made[at] = inner;
            made.insert(made.begin() + at, outer);
            split.push_back(std::move(made));
        }
    };
    for (const Box& box : boxes_) {
        const Range range = box[at];
        const std::int64_t first = range.first / length;
        const std::int64_t last = range.end / length;
        const std::int64_t skipped = range.first % length;
        if (first == last) {
            add(box, {first, first + 1}, {skipped, range.end % length});
            continue;
        }
        if (skipped != 0) {
            add(box, {first, first + 1}, {skipped, length});
        }
        add(box, {skipped != 0 ? first + 1 : first, last}, {0, length});
        add(box, {last, last + 1}, {0, range.end % length});
    }
    steps_.insert(steps_.begin() + at, step);
    boxes_ = std::move(split);
    return true;
}

// Return `region` as a box (a range of indices for each axis), or none if that is impossible.
// Splits axes as needed.
std::optional<UnwrittenBytes::Box> UnwrittenBytes::box_of(const ByteRegion& region) {
    for (const ByteRegion::Axis& axis : region.axes) {
        if (!split_axis(axis.step)) {
            return {};
        }
    }
    Box box;
    Bytes rest = region.offset;
    const auto* axis = region.axes.begin();
    for (const Bytes step : steps_) {
        std::int64_t count = 1;
        if (axis != region.axes.end() && axis->step == step) {
            count = axis++->count;
        }
        box.push_back({rest / step, rest / step + count});
        rest %= step;
    }
    if (axis != region.axes.end()) {
        return {};  // two axes have the same step, so that they overlap
    }
    // A region that covers an axis several times covers as many indices of the next larger axis.
    for (std::size_t i = steps_.size() - 1; i > 0; --i) {
        const std::int64_t length = steps_[i - 1] / steps_[i];
        if (box[i].end <= length) {
            continue;
        }
        Range& larger = box[i - 1];
        if (box[i].first != 0 || box[i].end % length != 0 || larger.end - larger.first != 1) {
            return {};
        }
        larger.end = larger.first + box[i].end / length;
        box[i].end = length;
    }
    return box;
}

// Return the unwritten boxes without the bytes of `box`.
std::vector<UnwrittenBytes::Box> UnwrittenBytes::without(const Box& box) const {
    std::vector<Box> left;
    for (const Box& each : boxes_) {
        if (!intersection(each, box)) {
            left.push_back(each);
            continue;
        }
        Box rest = each;
        for (std::size_t i = 0; i < box.size(); ++i) {
            if (rest[i].first < box[i].first) {
                left.push_back(rest);
                left.back()[i].end = box[i].first;
                rest[i].first = box[i].first;
            }
            if (rest[i].end > box[i].end) {
                left.push_back(rest);
                left.back()[i].first = box[i].end;
                rest[i].end = box[i].end;
            }
        }
    }
    return left;
}

// Replace the unwritten boxes by `boxes`. Return false if these are too many.
bool UnwrittenBytes::become(std::vector<Box> boxes) {
    if (boxes.size() > MOST_BOXES) {
        return false;
    }
    boxes_ = std::move(boxes);
    return true;
}

std::optional<UnwrittenBytes::Box> UnwrittenBytes::intersection(const Box& one, const Box& other) {
    Box both;
    for (std::size_t i = 0; i < one.size(); ++i) {
        both.push_back(
            {std::max(one[i].first, other[i].first), std::min(one[i].end, other[i].end)}
        );
        if (both.back().first >= both.back().end) {
            return {};
        }
    }
    return both;
}

}  // namespace rekindle
