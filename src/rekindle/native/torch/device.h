// The device that a budget is for, where it queues what it is told: order among a program's
// streams, and what its allocator says. Nothing here needs CUDA's headers.
//
// A program orders its streams for what it does itself: a value is read on another stream only
// after a wait. Recomputation and eviction come at other moments, on whatever stream is current
// then, and the program knows nothing of them. So with a second stream in sight, what runs again
// waits for those that made what it reads, and those that read what it makes wait for it; memory
// that is evicted goes to whoever wants it only when all its readers have run. A program with one
// stream pays for one question.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "../base/types.h"
#include "streams.h"

namespace rekindle {

// The kind of device that has streams, an allocator that can be asked, and small generators.
inline constexpr c10::DeviceType ACCELERATOR = c10::DeviceType::CUDA;

// Whether there was no memory to be had: by PyTorch's allocator, or by a library's own.
bool is_full(const std::exception& error);
// Without the frames that it went through.
std::string said_by(const std::exception& error);
// What an allocator wanted of the device when it said this, to a hundredth of the unit (at least as
// much); 0: it does not say.
Bytes asked_for(std::string_view said);

// What the allocator of a device says of the bytes that it gives out, to whomever.
struct GivenOut final {
    Bytes current;
    Bytes peak;      // the most at once, since the program last began to count anew
    Bytes returned;  // all that ever came back
};

class Device final {
public:
    explicit Device(c10::Device which);

    // Else it is the CPU, and there is nothing to put in order.
    bool queues() const noexcept { return guard_ != nullptr; }

    c10::Device which() const noexcept { return which_; }

    // The stream that the next operator will run on.
    c10::Stream current_stream() const { return guard_->getStream(which_); }

    // Likewise; none: there are no streams.
    std::optional<c10::Stream> stream_if_any() const {
        return guard_ == nullptr ? std::nullopt : std::optional(current_stream());
    }

    // Whether what is launched now goes into a graph, and nothing may be asked of the device.
    bool is_capturing() const { return is_capturing(stream_if_any()); }

    // Likewise, where that is the current stream.
    bool is_capturing(const std::optional<c10::Stream>& now) const;

    // Which stream of the program what is queued now goes to.
    StreamIndex see() { return see(stream_if_any()); }

    // Likewise, where that is the current stream.
    StreamIndex see(const std::optional<c10::Stream>& now) { return now ? streams.see(*now) : 0; }

    // What `act` runs comes after all that is queued, and before all that comes later.
    template <class F>
    void in_order(F&& act) {
        const StreamIndex here = see();
        if (!streams.are_several() || !orders) {
            act();
            return;
        }
        streams.wait_for_others(here);
        try {
            act();
        } catch (...) {
            streams.let_others_wait(here);
            throw;
        }
        streams.let_others_wait(here);
    }

    // The program is about to read, or to write, what is in `home` on the stream `here`.
    void about_to_read(const c10::StorageImpl& home, Order& order, StreamIndex here) {
        if (streams.are_several()) {
            read(home, order, here);
        }
    }

    // What was made again on the current stream may be read on any other, where nobody sees it.
    void hand_to_any_stream(const c10::StorageImpl& home) {
        if (orders_readers) {
            streams.let_others_wait(see());
        }
        keep_until_read(home, StreamSet::all());
    }

    void about_to_write(const Order& order, StreamIndex here) {
        if (streams.are_several() && orders_writers) {
            streams.wait_for(here, order.again_readers);
        }
    }

    // Likewise a recomputation, of which the program knows nothing.
    void about_to_read_again(const c10::StorageImpl& home, Order& order, StreamIndex here);
    void about_to_write_again(const Order& order, StreamIndex here);
    // An optimizer is about to write what recomputations have read, maybe where nobody sees it.
    void about_to_step();
    // When `home` is freed its block stays until all has run that `readers` have queued by then.
    void keep_until_read(
        const c10::StorageImpl& home, const StreamSet& readers = StreamSet::all()
    ) const;
    // What the allocator says now.
    GivenOut given_out() const;

    // Bytes that the allocator has taken of the device, and the most that it ever had.
    Bytes reserved() const;
    Bytes most_reserved() const;

    // Bytes that it has given out, to whomever.
    Bytes allocated() const { return given_out().current; }

    // What memory of `nbytes` takes there.
    Bytes rounded(Bytes nbytes) const noexcept {
        constexpr Bytes grain = 512;  // it gives out no less, and multiples of it
        return queues() ? (nbytes + grain - 1) / grain * grain : nbytes;
    }

    // What the allocator keeps for later goes back to the device.
    void empty_cache() const;

    // Off in tests that show what each is for.
    bool learns = true;  // what operators take inside themselves
    bool guesses = true;
    bool orders = true;          // a recomputation waits for those that made what it reads,
    bool orders_readers = true;  // those that read what it makes wait for it,
    bool orders_writers = true;  // and those that write what it reads
    bool keeps = true;
    bool doubts = true;
    bool keeps_back = true;
    bool has_neighbors = true;
    bool finds_places = true;

    Streams streams;  // of the program

private:
    c10::CachingDeviceAllocator::DeviceStats stats() const;
    void read(const c10::StorageImpl& home, Order& order, StreamIndex here);
    void keep_for(const c10::StorageImpl& home, Order& order, StreamIndex here) const;

    const c10::Device which_;
    const c10::impl::DeviceGuardImplInterface* guard_ = nullptr;
    StreamSet recomputed_on_;  // since the last step
};

}  // namespace rekindle
