#include "counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "../base/mutex.h"
#include "../base/slab.h"
#include "arena.h"

namespace rekindle {

namespace {

// The allocations since a measurement began. The sizes are those requested, because sizes that the
// allocator has rounded differ from run to run.
struct Watch final {
    struct Piece final {
        Bytes bytes;
        // Number of the operator that was measured when the piece was allocated; 0 if none was
        // measured.
        std::uint64_t during;
    };

    std::atomic<bool> on{false};
    SpinLock& mutex = leaf(Leaf::allocations);
    std::unordered_map<const void*, Piece> pieces;
    std::uint64_t operators = 0;  // Number of operators measured so far.
    bool watching = false;        // True while an operator is measured.
    bool tallying = false;
    Bytes limit = UNLIMITED;  // Largest value that `given.now` may have.
    std::optional<MoveLimit> move;
    std::thread::id limited;  // The limit applies only to allocations of this thread.
    GivenOutInside given;     // Bytes allocated while the measured operator runs.
    GivenOutInside tally;     // Bytes allocated since `tally_allocations` (tests only).

    // Throw `std::bad_alloc` if an allocation of `bytes` by this thread would exceed the limit.
    // Other threads are never refused: they may run code of a library that cannot fail.
    void check_limit(Bytes bytes) {
        std::unique_lock guard(mutex);
        if (!watching || bytes <= limit - given.now || limited != std::this_thread::get_id()) {
            return;
        }
        if (const auto moving = std::exchange(move, std::nullopt)) {
            const Bytes wanted = given.now + bytes;
            limit = UNLIMITED;  // what `move` allocates itself
            guard.unlock();
            const Bytes found = (*moving)(wanted);
            guard.lock();
            move = moving;
            limit = found;
            if (bytes <= limit - given.now) {
                return;
            }
        }
        given.refused = given.now + bytes;
        throw std::bad_alloc();
    }

    void takes(const void* piece, Bytes bytes) {
        const std::scoped_lock guard(mutex);
        pieces[piece] = {bytes, watching ? operators : 0};
        if (watching) {
            add(given, bytes);
        }
        if (tallying) {
            add(tally, bytes);
        }
    }

    void gives_back(const void* piece) {
        const std::scoped_lock guard(mutex);
        const auto found = pieces.find(piece);
        if (found == pieces.end()) {
            return;  // The piece was allocated before the measurement began.
        }
        if (watching && found->second.during == operators) {
            given.now -= found->second.bytes;
        }
        if (tallying) {
            tally.now -= found->second.bytes;
        }
        pieces.erase(found);
    }

    // Set whether operators are measured (`watches`), and whether the separate count for tests runs
    // (`tallies`).
    void set(bool watches, bool tallies) {
        watching = watches;
        tallying = tallies;
        on.store(watches || tallies, std::memory_order_relaxed);
    }

private:
    static void add(GivenOutInside& to, Bytes bytes) {
        to.now += bytes;
        to.most = std::max(to.most, to.now);
    }
};

// Return the `Watch` of the process. It is never destroyed, because memory may be freed while the
// process ends.
[[gnu::always_inline]] inline Watch& the_watch() noexcept {
    static auto& made = leaky_singleton<Watch>();
    return made;
}

// Allocator that wraps PyTorch's CPU allocator and counts the bytes that it allocates.
class CountingAllocator final : public c10::Allocator {
public:
    explicit CountingAllocator(c10::Allocator& counted) : counted_(counted) {}

    c10::DataPtr allocate(std::size_t bytes) override {
        AllocationLimit::check(static_cast<Bytes>(bytes));
        if (the_watch().on.load(std::memory_order_relaxed)) [[unlikely]] {
            the_watch().check_limit(static_cast<Bytes>(bytes));
        }
        void* const found = the_arena().take(bytes);
        c10::DataPtr piece = found == nullptr
                                 ? counted_.allocate(bytes)
                                 : c10::DataPtr(found, found, &give_back, c10::DeviceType::CPU);
        if (!the_watch().on.load(std::memory_order_relaxed)) [[likely]] {
            return piece;
        }
        if ((piece.get_deleter() == &give_back ||
             piece.compare_exchange_deleter(own(), &give_back))) {
            the_watch().takes(piece.get_context(), static_cast<Bytes>(bytes));
        }
        return piece;
    }

    // Return the deleter for memory that is allocated without a tensor (`raw_allocate`). Libraries
    // such as oneDNN ask for this deleter only when they free memory. `give_back` can free any
    // memory, but is only needed while an operator is measured, or once the arena was open.
    c10::DeleterFnPtr raw_deleter() const override {
        const bool watched = the_watch().on.load(std::memory_order_relaxed);
        return watched || the_arena().was_open() ? &give_back : own();
    }

    c10::DeleterFnPtr own() const { return counted_.raw_deleter(); }

    bool is_simple_data_ptr(const c10::DataPtr& piece) const override {
        return piece.get() == piece.get_context();
    }

    void copy_data(void* to, const void* from, std::size_t bytes) const override {
        counted_.copy_data(to, from, bytes);
    }

    static void give_back(void* piece);

private:
    c10::Allocator& counted_;
};

// Return the pointer to the counting allocator. The allocator is never destroyed, because tensors
// keep its deleter.
CountingAllocator*& the_counting() {
    static CountingAllocator* made = nullptr;
    return made;
}

void CountingAllocator::give_back(void* piece) {
    if (the_watch().on.load(std::memory_order_relaxed)) [[unlikely]] {
        the_watch().gives_back(piece);
    }
    if (!the_arena().give(piece)) {
        the_counting()->own()(piece);
    }
}

}  // namespace

namespace {

AllocationLimit*& innermost_limit() noexcept {
    thread_local AllocationLimit* found = nullptr;
    return found;
}

// True once a scope has existed; until then `check` costs next to nothing.
std::atomic<bool>& limits_exist() noexcept {
    static std::atomic<bool> found{false};
    return found;
}

}  // namespace

AllocationLimit::AllocationLimit(Bytes most) noexcept
    : most_(most), innermost_(innermost_limit()), outer_(innermost_) {
    innermost_ = this;
    if (!limits_exist().load(std::memory_order_relaxed)) {
        limits_exist().store(true, std::memory_order_relaxed);
    }
}

AllocationLimit::~AllocationLimit() {
    innermost_ = outer_;
}

void AllocationLimit::check(Bytes bytes) {
    if (!limits_exist().load(std::memory_order_relaxed)) [[likely]] {
        return;
    }
    AllocationLimit* limit = innermost_limit();
    if (limit != nullptr && bytes > limit->most_) {
        limit->refused_ = true;
        throw std::bad_alloc();
    }
}

void count_allocations() {
    c10::Allocator* there = c10::GetCPUAllocator();
    if (the_counting() != nullptr || there == nullptr || there->raw_deleter() == nullptr) {
        return;
    }
    // Make them now: if a thread forked while another one did, the child would wait for it for
    // ever.
    static_cast<void>(the_watch());
    static_cast<void>(the_arena());
    the_counting() = &leaky_singleton<CountingAllocator>(*there);
    // This call has no effect if another allocator has a higher priority.
    c10::SetCPUAllocator(the_counting(), 1);
}

bool allocations_are_counted() noexcept {
    return the_counting() != nullptr && c10::GetCPUAllocator() == the_counting();
}

c10::DeleterFnPtr pytorchs_deleter() noexcept {
    static const c10::DeleterFnPtr found =
        allocations_are_counted() ? the_counting()->own() : c10::GetCPUAllocator()->raw_deleter();
    return found;
}

c10::DeleterFnPtr counting_deleter() noexcept {
    return &CountingAllocator::give_back;
}

void watch_allocations(Bytes limit, std::optional<MoveLimit> move) {
    Watch& watch = the_watch();
    const std::scoped_lock guard(watch.mutex);
    if (!watch.tallying) {
        watch.pieces.clear();
    }
    ++watch.operators;
    watch.given = {};
    watch.limit = limit;
    watch.move = move;
    watch.limited = std::this_thread::get_id();
    watch.set(true, watch.tallying);
}

GivenOutInside watched_allocations() noexcept {
    Watch& watch = the_watch();
    const std::scoped_lock guard(watch.mutex);
    watch.set(false, watch.tallying);
    watch.move.reset();
    return watch.given;
}

void tally_allocations(bool tallies) {
    Watch& watch = the_watch();
    const std::scoped_lock guard(watch.mutex);
    watch.pieces.clear();
    watch.tally = {};
    watch.set(watch.watching, tallies);
}

GivenOutInside tallied_allocations() noexcept {
    Watch& watch = the_watch();
    const std::scoped_lock guard(watch.mutex);
    const GivenOutInside found = watch.tally;
    watch.tally.most = watch.tally.now;
    return found;
}

}  // namespace rekindle
