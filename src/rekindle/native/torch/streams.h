// Streams of a program, and waits between them for values that the runtime recomputes on one stream
// and the program reads on another. The program does not know of recomputations, so it does not
// wait.
//
// The order is kept as a vector clock (Mattern 1989): for each pair of streams, the latest point of
// one that the other waits for. So no wait is queued twice, and a stream waits only for streams
// that made or read the value. The runtime does not see the program's own waits, so it repeats some
// of them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../base/types.h"

namespace rekindle {

// Index of a stream, in the order of first use.
using StreamIndex = std::uint32_t;

inline constexpr StreamIndex ANY_STREAM = std::numeric_limits<StreamIndex>::max();

// Set of streams as a bit mask. Streams beyond the first 32 are not distinguished: each of them
// stands for all streams.
class StreamSet final {
public:
    static constexpr StreamIndex MOST = 32;

    bool has(StreamIndex stream) const noexcept {
        return stream < MOST ? (bits_ >> stream & 1) != 0 : bits_ == ALL;
    }

    void add(StreamIndex stream) noexcept {
        bits_ |= stream < MOST ? std::uint32_t{1} << stream : ALL;
    }

    static StreamSet all() noexcept {
        StreamSet made;
        made.bits_ = ALL;
        return made;
    }

private:
    static constexpr std::uint32_t ALL = std::numeric_limits<std::uint32_t>::max();

    std::uint32_t bits_ = 0;
};

// Order of accesses to the value in a storage: the stream that made the value, and the streams that
// read it. `Order()` means: unknown.
struct Order final {
    std::uint64_t made_at = 0;  // Time at which the operator that made the value was queued.
    // streams that read the value, and the stream `maker` that made it
    StreamSet readers = StreamSet::all();
    // Streams on which recomputations read the value without the program's knowledge, so that the
    // program does not wait for them.
    StreamSet again_readers;
    StreamSet kept_for;  // Streams that the allocator waits for before it reuses the memory.
    StreamIndex maker = ANY_STREAM;
    bool again = false;  // the value was recomputed, which the program does not know
};

// The streams of one device, in the order of first use.
class Streams final {
public:
    // Return the streams that the program has used so far.
    const c10::SmallVector<c10::Stream, 2>& seen() const noexcept { return seen_; }

    bool are_several() const noexcept { return seen_.size() > 1; }

    // Return the index of `stream`, and register the stream if it is new.
    StreamIndex see(const c10::Stream& stream) {
        if (!seen_.empty() && seen_.front() == stream) {
            return 0;
        }
        return see_another(stream);
    }

    // Return the `Order` of a value that a stream unknown to the runtime writes now.
    Order unknown() noexcept {
        Order order;
        order.made_at = ++now_;
        return order;
    }

    // Return the `Order` of a value whose computation was just queued on the stream `maker`. again:
    // the value was recomputed.
    Order made_by(StreamIndex maker, bool again = false) noexcept {
        Order order;
        order.made_at = ++now_;
        order.readers = {};
        order.readers.add(maker);
        order.maker = maker;
        order.again = again;
        return order;
    }

    // Return the `Order` of the value in `storage`, to be changed. A storage without an order gets
    // one that says: made by an unknown stream before a second stream was in use.
    Order& order_of(StorageId storage) {
        const auto [found, added] = orders_.try_emplace(storage);
        if (added) {
            found->second.made_at = are_several() ? since_ : ++now_;
        }
        return found->second;
    }

    // Return true if the `Order` of the value in a storage is known. While only one stream was
    // used, that holds only for values that were recomputed or that a recomputation read.
    bool has_order(StorageId storage) const {
        return are_several() || (!orders_.empty() && orders_.contains(storage));
    }

    // Store `order` for the value in `storage`.
    void note(StorageId storage, const Order& order) {
        if (are_several() || order.again) [[unlikely]] {
            orders_.insert_or_assign(storage, order);
        } else {
            forget(storage);
        }
    }

    // Record that the value in `storage` moved to other memory, whose readers the allocator does
    // not know.
    void moved(StorageId storage) {
        if (has_order(storage)) {
            order_of(storage).kept_for = {};
        }
    }

    // Forget the `Order` of the value in `storage`, because it was freed or its maker is unknown.
    void forget(StorageId storage) noexcept {
        if (!orders_.empty()) {
            orders_.erase(storage);
        }
    }

    // Return the bytes that the bookkeeping of streams takes.
    Bytes nbytes() const noexcept;

    // Make `stream` wait for the operator that made the value with this order.
    void wait_for_maker(StreamIndex stream, const Order& order);
    // Make `stream` wait for all work queued on `others`.
    void wait_for(StreamIndex stream, const StreamSet& others);
    // `wait_for_others` makes `stream` wait for all other streams; `let_others_wait` makes all
    // other streams wait for `stream`.
    void wait_for_others(StreamIndex stream);
    void let_others_wait(StreamIndex stream);

private:
    static constexpr StreamIndex MOST = StreamSet::MOST;

    StreamIndex see_another(const c10::Stream& stream);
    void wait(const c10::Stream& waiting, const c10::Stream& first);
    void wait_until(StreamIndex stream, StreamIndex first, std::uint64_t until);

    c10::SmallVector<c10::Stream, 2> seen_;
    std::uint64_t now_ = 0;
    std::uint64_t since_ = 0;  // Time at which the program first used a second stream.
    std::unordered_map<StorageId, Order> orders_;
    // For each pair of the first 32 streams: the time up to which the first stream waits for the
    // second.
    std::vector<std::uint64_t> comes_after_;
    // CUDA event for all waits between streams; each wait records it again
    std::optional<c10::Event> event_;
};

}  // namespace rekindle
