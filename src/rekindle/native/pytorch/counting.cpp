#include "counting.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <optional>

#include "../base/slab.h"

#if defined(__APPLE__)
#include <malloc/malloc.h>
#elif defined(__GLIBC__)
#include <malloc.h>
#endif

namespace rekindle {

namespace {

// What a piece takes. 0: nobody can tell.
std::size_t size_of(void* piece) noexcept {
#if defined(__APPLE__)
    return malloc_size(piece);
#elif defined(__GLIBC__)
    return malloc_usable_size(piece);
#else
    static_cast<void>(piece);
    return 0;
#endif
}

std::atomic<Bytes> given_out{0};
std::atomic<Bytes> most{0};

void change(Bytes bytes) noexcept {
    const Bytes now = given_out.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    if (bytes <= 0) {
        return;
    }
    Bytes before = most.load(std::memory_order_relaxed);
    while (now > before && !most.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
    }
}

class Counting final : public c10::Allocator {
public:
    explicit Counting(c10::Allocator& counted) : counted_(counted) {}

    c10::DataPtr allocate(std::size_t bytes) override {
        c10::DataPtr piece = counted_.allocate(bytes);
        if (piece.compare_exchange_deleter(counted_.raw_deleter(), &give_back)) {
            change(static_cast<Bytes>(size_of(piece.get_context())));
        }
        return piece;
    }

    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

    bool is_simple_data_ptr(const c10::DataPtr& piece) const override {
        return piece.get() == piece.get_context();
    }

    void copy_data(void* to, const void* from, std::size_t bytes) const override {
        counted_.copy_data(to, from, bytes);
    }

    c10::DeleterFnPtr counted_deleter() const { return counted_.raw_deleter(); }

    static void give_back(void* piece);

private:
    c10::Allocator& counted_;
};

// Never destroyed: tensors keep its deleter.
std::optional<Counting>& the_counting() {
    static std::optional<Counting>& made = immortal<std::optional<Counting>>();
    return made;
}

void Counting::give_back(void* piece) {
    change(-static_cast<Bytes>(size_of(piece)));
    the_counting()->counted_deleter()(piece);
}

// Whether pieces of `allocator` come from where their size can be asked for.
bool sizes_are_told(c10::Allocator& allocator) {
    if (allocator.raw_deleter() == nullptr) {
        return false;
    }
    constexpr std::array<std::size_t, 3> SIZES{24, 5'000, 3'000'000};
    constexpr std::size_t MOST_ROUNDED = 8'192;
    for (const std::size_t bytes : SIZES) {
        const c10::DataPtr piece = allocator.allocate(bytes);
        const std::size_t told = size_of(piece.get_context());
        if (told < bytes || told > bytes + MOST_ROUNDED) {
            return false;
        }
    }
    return true;
}

}  // namespace

void count_allocations() {
    c10::Allocator* there = c10::GetCPUAllocator();
    if (the_counting() || there == nullptr || !sizes_are_told(*there)) {
        return;
    }
    the_counting().emplace(*there);
    c10::SetCPUAllocator(&*the_counting(), 1);  // nothing happens if another has a higher priority
}

bool allocations_are_counted() noexcept {
    return the_counting().has_value() && c10::GetCPUAllocator() == &*the_counting();
}

c10::DeleterFnPtr allocators_own() noexcept {
    static const c10::DeleterFnPtr found =
        the_counting() ? the_counting()->counted_deleter() : c10::GetCPUAllocator()->raw_deleter();
    return found;
}

c10::DeleterFnPtr counting_ones_own() noexcept {
    return &Counting::give_back;
}

Bytes allocated_now() noexcept {
    return given_out.load(std::memory_order_relaxed);
}

Bytes allocated_at_most() noexcept {
    return most.load(std::memory_order_relaxed);
}

void watch_allocations() noexcept {
    most.store(allocated_now(), std::memory_order_relaxed);
}

}  // namespace rekindle
