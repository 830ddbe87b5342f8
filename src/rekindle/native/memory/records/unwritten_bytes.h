// The bytes of a storage made by `empty` that no operator has written yet.
//
// NOTE [Unwritten bytes]
//
// Scenario: a program allocates its result by `empty`, and fills it by writes to slices. So does
// PyTorch itself: `pad` with `mode="circular"` is one `new_empty` and several copies.
//
// `empty` has a recipe. The recipe gives other contents, and code outside the dispatcher may have
// filled the memory. So a storage keeps the flag `UNWRITTEN` until operators have written all of
// its bytes. A storage with this flag is not evicted while the program holds it. It loses its
// recipe when an operator reads unwritten bytes, or when autograd saves it. Reads of written bytes
// are harmless: a recomputation writes them again first.
//
// The unwritten bytes are a list of disjoint boxes. A box is a range of indices for each axis. The
// axes come from the strides of the tensors that are read and written: the storage begins as a
// single axis, and each new stride splits an axis in two. The bytes of some tensors are no box, for
// example if two axes of the tensor overlap.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../base/types.h"

namespace rekindle {

// The bytes of a tensor in its storage: `offset`, plus a multiple of the step of each axis.
struct ByteRegion final {
    struct Axis final {
        Bytes step;
        std::int64_t count;
    };

    Bytes offset = 0;
    bool is_empty = false;
    // Axes by descending step, without those of a single element. Two axes that are contiguous are
    // merged into one.
    c10::SmallVector<Axis, 6> axes;

    // Return the bytes of `tensor`, which must be plain (`is_plain`).
    static ByteRegion of(const c10::TensorImpl& tensor);
    // Sort `axes` and merge those that are contiguous.
    void normalize();
};

// The bytes of one storage that no operator has written since `empty` made the storage.
class UnwrittenBytes final {
public:
    // All of the `nbytes` bytes of the storage are unwritten.
    explicit UnwrittenBytes(Bytes nbytes);

    // Return true if every byte was written.
    bool none() const noexcept { return boxes_.empty(); }

    // Return true if `region` may have an unwritten byte.
    bool overlaps(const ByteRegion& region);
    // Record that an operator has written `region`. If the bytes of `region` are no box, they still
    // count as unwritten, which is safe. Return false, and change nothing, if more than
    // `MOST_BOXES` boxes of unwritten bytes would be left. Otherwise return true.
    bool write(const ByteRegion& region);
    // Return true if `copy` can tell which bytes are unwritten after a copy from `source` to
    // `target`.
    bool can_copy(const ByteRegion& target, const ByteRegion& source);
    // Record that an operator has copied `source` to `target`, two regions of equal shape and
    // strides for which `can_copy` is true. Copies of unwritten bytes count as unwritten. Return
    // false, and change nothing, if more than `MOST_BOXES` boxes of unwritten bytes would be left.
    bool copy(const ByteRegion& target, const ByteRegion& source);

private:
    struct Range final {
        std::int64_t first;
        std::int64_t end;
    };

    // One range of indices for each axis.
    using Box = c10::SmallVector<Range, 5>;

    static constexpr std::size_t MOST_BOXES = 64;

    bool split_axis(Bytes step);
    std::optional<Box> box_of(const ByteRegion& region);
    std::optional<std::array<Box, 2>> boxes_of(const ByteRegion& one, const ByteRegion& other);
    std::vector<Box> without(const Box& box) const;
    bool become(std::vector<Box> boxes);
    static std::optional<Box> intersection(const Box& one, const Box& other);

    // Bytes from one index to the next of each axis, descending. Each is a multiple of the next
    // one. The last is 1.
    c10::SmallVector<Bytes, 5> steps_{1};
    std::vector<Box> boxes_;  // disjoint
};

}  // namespace rekindle
