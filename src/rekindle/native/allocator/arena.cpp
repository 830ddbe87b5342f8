#include "arena.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "../base/slab.h"

namespace rekindle {

void Arena::open(Bytes limit) {
    blocks_.begin();
    blocks_.note_counted(0);
    blocks_.limit(limit);
    bins_.keep_spares(true);
    was_open_.store(true, std::memory_order_relaxed);
    is_open_.store(true, std::memory_order_relaxed);
}

void Arena::close(bool lazily) {
    is_open_.store(false, std::memory_order_relaxed);
    bins_.keep_spares(false);
    blocks_.end(lazily);
}

void Arena::limit(Bytes limit) {
    if (is_open_.load(std::memory_order_relaxed)) {
        blocks_.limit(limit);
    }
}

void* Arena::take(std::size_t nbytes) {
    if (nbytes == 0 || !is_open_.load(std::memory_order_relaxed)) {
        return nullptr;
    }
    void* found = nbytes <= Bins::MOST ? bins_.take(nbytes) : blocks_.take(nbytes, nbytes);
    if (found != nullptr) {
        c10::profiledCPUMemoryReporter().New(found, nbytes);
    }
    return found;
}

bool Arena::give(void* address) {
    if (address == nullptr) {
        return false;
    }
    if (c10::memoryProfilingEnabled() && (bins_.has(address) || blocks_.has(address))) {
        // Report to the profiler that memory is freed before another thread can get this address.
        c10::profiledCPUMemoryReporter().Delete(address);
    }
    return bins_.give(address) || blocks_.give(address);
}

Arena& the_arena() noexcept {
    static auto& made = leaky_singleton<Arena>();
    return made;
}

}  // namespace rekindle
