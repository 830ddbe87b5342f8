// The device of a budget: its streams, its allocator, and the order of the work queued on it.
// Includes no CUDA headers.
//
// NOTE [Order among streams]
//
// A program orders its own work: it reads a value on another stream only after a wait. The runtime
// recomputes and evicts at other times, on whichever stream is current then. The program does not
// wait for that work. So with more than one stream in use:
//
// - a recomputation waits for the streams that made its inputs;
// - readers of a recomputed value wait for the stream that recomputed it;
// - evicted memory is reused only after all its readers have run.
//
// A program with one stream pays for a single comparison.
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

// Device type of accelerators: they have streams, an allocator with statistics, and generators with
// a small state.
inline constexpr c10::DeviceType ACCELERATOR = c10::DeviceType::CUDA;

// Return true if `error` means that the device is out of memory, as reported by PyTorch's allocator
// or by a library.
bool is_device_oom(const std::exception& error);
// Return the message of `error` without its C++ stack trace.
std::string message_of(const std::exception& error);
// Return the bytes of the failed allocation, parsed from `said`, an allocator's error message.
// Because the message prints a rounded number, the result is larger than the allocation by at most
// 1 % of the printed unit. Return 0 if the message does not name the size.
Bytes asked_for(std::string_view said);

// Statistics in bytes of a device's allocator, for all its users.
struct AllocatorStats final {
    Bytes current;
    Bytes peak;      // Largest `current` since the program last reset the peak.
    Bytes returned;  // Total bytes freed so far.
};

// The device of one budget.
class Device final {
public:
    explicit Device(c10::Device which);

    // Return true for an accelerator, which runs operators later, from a queue. Return false for a
    // CPU: each operator ends before the next begins, so nothing has to be ordered.
    bool queues() const noexcept { return guard_ != nullptr; }

    c10::Device which() const noexcept { return which_; }

    // Return the stream on which the next operator will run.
    c10::Stream current_stream() const { return guard_->getStream(which_); }

    // Return the current stream; none for a CPU.
    std::optional<c10::Stream> stream_if_any() const {
        if (guard_ == nullptr) [[likely]] {
            return std::nullopt;
        }
        return current_stream();
    }

    // Return true if a CUDA graph is being captured. During a capture the device's state must not
    // be queried.
    [[gnu::always_inline]] bool is_capturing() const {
        return queues() && is_capturing(current_stream());
    }

    // Return true if a CUDA graph is being captured, for a caller that already has the current
    // stream `now`.
    [[gnu::always_inline]] bool is_capturing(const std::optional<c10::Stream>& now) const {
        // CUDA cannot capture the default stream (id 0) into a graph.
        return now && now->id() != 0 && is_captured(*now);
    }

    // Return the index of the current stream, and register it if it is new.
    StreamIndex see() { return see(stream_if_any()); }

    // Return the index of the current stream `now`, and register the stream if it is new.
    StreamIndex see(const std::optional<c10::Stream>& now) { return now ? streams.see(*now) : 0; }

    // Run `act`. The work that `act` queues runs after all earlier work, and before all later work,
    // of every stream.
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

    // Order a read of `storage_impl` by the program, on the stream `here`. `about_to_write` does
    // the same for writes.
    void about_to_read(const c10::StorageImpl& storage_impl, StorageId storage, StreamIndex here) {
        if (streams.are_several()) {
            read(storage_impl, streams.order_of(storage), here);
        }
    }

    // Prepare for reads of a value that was recomputed on the current stream: other streams may
    // read it without a call of `about_to_read`.
    void hand_to_any_stream(const c10::StorageImpl& storage_impl) {
        if (orders_readers) {
            streams.let_others_wait(see());
        }
        keep_until_read(storage_impl);
    }

    void about_to_write(StorageId storage, StreamIndex here) {
        if (streams.are_several() && orders_writers) {
            streams.wait_for(here, streams.order_of(storage).again_readers);
        }
    }

    // Prepare for a read of `storage_impl` by a recomputation on the stream `here`. The program
    // does not know of the recomputation, so later writers must wait for it. `about_to_write_again`
    // does the same for writes.
    void about_to_read_again(
        const c10::StorageImpl& storage_impl, StorageId storage, StreamIndex here
    );
    void about_to_write_again(StorageId storage, StreamIndex here);
    // Let the writes of an optimizer step wait for recomputations on other streams that may have
    // read the parameters. The program does not know of these reads, so it does not wait itself.
    void about_to_step();

    // After `storage_impl` is freed, do not reuse its memory until all work that any stream has
    // queued by then is done.
    void keep_until_read(const c10::StorageImpl& storage_impl) const {
        keep_until_read(storage_impl, StreamSet::all());
    }

    // After `storage_impl` is freed, do not reuse its memory until the streams that made or read
    // the value of `storage` have finished their queued work.
    void keep_until_read(const c10::StorageImpl& storage_impl, StorageId storage) {
        if (streams.are_several()) {
            keep_until_read(storage_impl, streams.order_of(storage).readers);
        }
    }

    // Return the current statistics of the device's allocator.
    AllocatorStats given_out() const;

    // Return the bytes that the allocator has reserved on the device, and their peak.
    Bytes reserved() const;
    Bytes most_reserved() const;

    // Return the bytes that the device's allocator has given out.
    Bytes allocated() const { return given_out().current; }

    // Return the bytes that the device's allocator gives out for a request of `nbytes`.
    Bytes rounded(Bytes nbytes) const noexcept {
        // Smallest block of the allocator; all blocks are multiples of it.
        constexpr Bytes grain = 512;
        if (!queues()) [[likely]] {
            return nbytes;
        }
        return (nbytes + grain - 1) / grain * grain;
    }

    // Return the allocator's unused cached memory to the device.
    void empty_cache() const;

    // Features of the runtime. Tests switch them off one by one, to show that each is needed.
    bool learns = true;          // The workspaces of operators are measured.
    bool guesses = true;         // The workspaces of first calls are guessed.
    bool orders = true;          // A recomputation waits for the streams that made its inputs.
    bool orders_readers = true;  // Readers of a recomputed value wait for the recomputation.
    bool orders_writers = true;  // Writers of an input wait for recomputations that read it.
    bool keeps = true;           // Freed memory is not reused before all streams have read it.
    bool doubts = true;          // Some operators are recomputed only after a trial.
    bool keeps_back = true;      // Some memory of the device is left free.
    bool has_neighbors = true;   // After a device OOM, storages at adjacent addresses are evicted.
    bool finds_places = true;  // A device OOM solved by such an eviction does not lower the budget.

    Streams streams;  // Streams that the program uses.

private:
    c10::CachingDeviceAllocator::DeviceStats stats() const;
    bool is_captured(const c10::Stream& stream) const;
    void read(const c10::StorageImpl& storage_impl, Order& order, StreamIndex here);
    void keep_for(const c10::StorageImpl& storage_impl, Order& order, StreamIndex here) const;
    void keep_until_read(const c10::StorageImpl& storage_impl, const StreamSet& readers) const;

    const c10::Device which_;
    const c10::impl::DeviceGuardImplInterface* guard_ = nullptr;
    StreamSet recomputed_on_;  // Streams with recomputations since the last optimizer step.
};

}  // namespace rekindle
