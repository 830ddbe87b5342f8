// The streams of a program, and what has to wait for what: a value that was recomputed on one
// stream and is read on another, which the program knows nothing of.
//
// A vector clock: for each pair of streams, up to when the work of one comes before what is queued
// on the other (Mattern 1989). So nothing waits twice for the same, and nothing for a stream that
// neither made nor read the value. What the program itself waits for is not seen: it may be waited
// for once more.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace rekindle {

// Which stream of a program, in the order in which they were seen.
using StreamIndex = std::uint32_t;

inline constexpr StreamIndex ANY_STREAM = std::numeric_limits<StreamIndex>::max();

// Streams, by their bits. Those beyond the first 32 are not told from each other: one of them
// stands for all.
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

// Who made a value that is in memory, and who read it there. At first nothing is known of that.
struct Order final {
    std::uint64_t made_at = 0;             // when that was queued
    StreamSet readers = StreamSet::all();  // who made it is among them
    StreamSet again_readers;               // recomputations, of which the program does not know
    StreamSet kept_for;                    // the allocator knows of these
    StreamIndex maker = ANY_STREAM;
    bool again = false;  // recomputed: the program does not know of it
};

class Streams final {
public:
    // Those that were seen.
    const c10::SmallVector<c10::Stream, 2>& seen() const noexcept { return seen_; }

    bool are_several() const noexcept { return seen_.size() > 1; }

    // Which one it is.
    StreamIndex see(const c10::Stream& stream) {
        if (!seen_.empty() && seen_.front() == stream) {
            return 0;
        }
        return see_another(stream);
    }

    // Nothing is known of who makes what is in memory from now on.
    Order unknown() noexcept {
        Order order;
        order.made_at = ++now_;
        return order;
    }

    // `maker` has just queued what makes it.
    Order made_by(StreamIndex maker, bool again = false) noexcept {
        Order order;
        order.made_at = ++now_;
        order.readers = {};
        order.readers.add(maker);
        order.maker = maker;
        order.again = again;
        return order;
    }

    // What is queued on `stream` from now on comes after what made the value.
    void wait_for_maker(StreamIndex stream, const Order& order);
    // After all that `others` have queued.
    void wait_for(StreamIndex stream, const StreamSet& others);
    // After all that is queued, or before all that will be.
    void wait_for_others(StreamIndex stream);
    void let_others_wait(StreamIndex stream);

private:
    static constexpr StreamIndex MOST = StreamSet::MOST;

    StreamIndex see_another(const c10::Stream& stream);
    void wait(const c10::Stream& waiting, const c10::Stream& first);
    void wait_until(StreamIndex stream, StreamIndex first, std::uint64_t until);

    c10::SmallVector<c10::Stream, 2> seen_;
    std::uint64_t now_ = 0;
    std::vector<std::uint64_t> comes_after_;  // of each of the first 32, and of each before it
    std::optional<c10::Event> event_;         // recorded once more for each wait
};

}  // namespace rekindle
