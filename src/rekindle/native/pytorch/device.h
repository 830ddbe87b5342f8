// The device that a budget is for, where it queues what it is told: order among a program's
// streams, and what its allocator says. Nothing here needs CUDA's headers.
//
// A program orders its streams for what it does itself: a value is read on another stream only
// after a wait. Recomputation and eviction come at other moments, on whatever stream is current
// then, and the program knows nothing of them. So with a second stream in sight, what runs again
// waits for all of them and all of them wait for it, and memory that is evicted goes to whoever
// wants it only when everything that was queued before has run. A program with one stream pays for
// one question.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/SmallVector.h>

#include <exception>
#include <string>
#include <string_view>

#include "../base/types.h"

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

    // Whether what is launched now goes into a graph, and nothing may be asked of the device.
    bool is_capturing() const;

    // The stream that the next operator will run on.
    c10::Stream current_stream() const { return guard_->getStream(which_); }

    // An operator is about to run, on the current stream.
    void see() {
        if (guard_ != nullptr && (seen_.empty() || seen_.front() != current_stream())) {
            see(current_stream());
        }
    }

    // What `act` runs comes after all that is queued, and before all that comes later.
    template <class F>
    void in_order(F&& act) {
        see();
        if (seen_.size() < 2 || !orders) {
            act();
            return;
        }
        wait_for_others();
        try {
            act();
        } catch (...) {
            let_others_wait();
            throw;
        }
        let_others_wait();
    }

    // The streams of the program, in the order in which they were seen.
    const c10::SmallVector<c10::Stream, 2>& seen() const noexcept { return seen_; }

    // When `home` is freed its block stays until all has run that was queued by then.
    void keep_until_read(const c10::StorageImpl& home) const;
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
    bool orders = true;
    bool keeps = true;
    bool doubts = true;
    bool keeps_back = true;
    bool has_neighbors = true;
    bool finds_places = true;

private:
    c10::CachingDeviceAllocator::DeviceStats stats() const;
    void see(const c10::Stream& stream);
    void wait_for_others() const;
    void let_others_wait() const;

    const c10::Device which_;
    const c10::impl::DeviceGuardImplInterface* guard_ = nullptr;
    c10::SmallVector<c10::Stream, 2> seen_;  // the streams of the program
};

}  // namespace rekindle
