// Memory pools for many small objects of one type. A pool cuts pages of memory into slots. Freed
// slots are reused, and pages are freed when the pool is destroyed. Only this file calls new and
// delete directly.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "mutex.h"

#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_poison_memory_region(const volatile void* memory, std::size_t nbytes);
#endif

namespace rekindle {

// In builds for the address sanitizer, report later accesses to this memory of a pool, and return
// true: it must not be reused then. Else return false.
inline bool poison(
    [[maybe_unused]] const void* memory, [[maybe_unused]] std::size_t nbytes
) noexcept {
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(memory, nbytes);
    return true;
#else
    return false;
#endif
}

// Pool of objects of type `T`. An object stays at its address until it is destroyed.
template <class T>
class Slab {
public:
    Slab() = default;
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    ~Slab() = default;  // Does not destroy live objects: the owner of the pool must do so.

    // Make an object. The returned reference is valid until `drop` destroys the object.
    template <class... Arguments>
    T& make(Arguments&&... arguments) {
        if (free_ == nullptr) {
            grow();
        }
        Slot* slot = free_;
        Slot* next = slot->next;
        fetch(next);
        T* made = new (static_cast<void*>(slot)) T(std::forward<Arguments>(arguments)...);
        free_ = next;
        ++alive_;
        return *made;
    }

    // Destroy an object, so that its slot can be reused.
    void drop(T& object) noexcept {
        object.~T();
        --alive_;
        if (poison(&object, sizeof(Slot))) {
            return;
        }
        Slot* slot = new (static_cast<void*>(&object)) Slot;
        slot->next = free_;
        free_ = slot;
    }

    std::size_t alive() const noexcept { return alive_; }

    std::size_t nbytes() const noexcept { return pages_.size() * PAGE * sizeof(Slot); }

private:
    // Slots per page. The number is small, so that small programs need little memory.
    static constexpr std::size_t PAGE = 32;
    static constexpr std::size_t LINE = 64;  // Size of a cache line in bytes.

    union Slot {
        Slot* next = nullptr;
        alignas(T) std::array<std::byte, sizeof(T)> memory;
    };

    // Load a slot into the processor's cache early, because the next object will be made in this
    // slot.
    static void fetch(const Slot* slot) noexcept {
        if (slot == nullptr) {
            return;
        }
        const auto* bytes = static_cast<const std::byte*>(static_cast<const void*>(slot));
        for (std::size_t at = 0; at < sizeof(Slot); at += LINE) {
            __builtin_prefetch(bytes + at, 1);
        }
    }

    void grow() {
        pages_.push_back(std::make_unique<std::array<Slot, PAGE>>());
        for (Slot& slot : *pages_.back()) {
            slot.next = free_;
            free_ = &slot;
        }
    }

    std::vector<std::unique_ptr<std::array<Slot, PAGE>>> pages_;
    Slot* free_ = nullptr;
    std::size_t alive_ = 0;
};

// Pool of short arrays of trivially copyable elements, one free list per power of two.
template <class T>
class Arrays {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) >= sizeof(void*));

public:
    Arrays() = default;
    Arrays(const Arrays&) = delete;
    Arrays& operator=(const Arrays&) = delete;
    ~Arrays() = default;

    // Return uninitialized memory for `length` elements; null if `length` is 0.
    T* take(std::size_t length) {
        if (length == 0) {
            return nullptr;
        }
        const auto kind = static_cast<std::size_t>(std::bit_width(length - 1));
        if (kind >= free_.size()) {
            return static_cast<T*>(::operator new(length * sizeof(T)));
        }
        if (free_[kind] == nullptr) {
            grow(kind);
        }
        void* found = free_[kind];
        free_[kind] = *static_cast<void**>(found);
        return static_cast<T*>(found);
    }

    // Free an array of `length` elements that `take` returned.
    void give(T* array, std::size_t length) noexcept {
        if (length == 0) {
            return;
        }
        const auto kind = static_cast<std::size_t>(std::bit_width(length - 1));
        if (kind >= free_.size()) {
            ::operator delete(array);
            return;
        }
        if (poison(array, length * sizeof(T))) {
            return;
        }
        *static_cast<void**>(static_cast<void*>(array)) = free_[kind];
        free_[kind] = array;
    }

    std::size_t nbytes() const noexcept { return pages_.size() * PAGE * sizeof(T); }

private:
    static constexpr std::size_t KINDS = 7;   // Number of pooled sizes: 1, 2, 4, ..., 64 elements.
    static constexpr std::size_t PAGE = 128;  // Elements per page.

    struct Page {
        alignas(T) std::array<std::byte, PAGE * sizeof(T)> memory;
    };

    void grow(std::size_t kind) {
        pages_.push_back(std::make_unique<Page>());
        const std::size_t step = (std::size_t{1} << kind) * sizeof(T);
        std::byte* memory = pages_.back()->memory.data();
        for (std::size_t at = 0; at + step <= PAGE * sizeof(T); at += step) {
            *static_cast<void**>(static_cast<void*>(memory + at)) = free_[kind];
            free_[kind] = memory + at;
        }
    }

    std::vector<std::unique_ptr<Page>> pages_;
    std::array<void*, KINDS> free_{};
};

// Base class of `T`, whose objects any thread may make and destroy. Their memory comes from a pool
// of the whole process, which takes less time than the general allocator. The pool keeps the memory
// of the most objects that existed at one time.
template <class T>
class Pooled {
public:
    static void* operator new(std::size_t /*nbytes*/) {
        const std::scoped_lock guard(leaf(Leaf::pools));
        return slots().take(1);
    }

    static void operator delete(void* memory) noexcept {
        const std::scoped_lock guard(leaf(Leaf::pools));
        slots().give(static_cast<Slot*>(memory), 1);
    }

protected:
    Pooled() = default;
    ~Pooled() = default;

private:
    struct Slot final {
        alignas(T) std::array<std::byte, sizeof(T)> memory;
    };

    static Arrays<Slot>& slots();
};

// Make an object that is never destroyed, because it is still used while the process ends.
template <class T, class... Arguments>
T& leaky_singleton(Arguments&&... arguments) {
    return *new T(std::forward<Arguments>(arguments)...);
}

template <class T>
Arrays<typename Pooled<T>::Slot>& Pooled<T>::slots() {
    static auto& made = leaky_singleton<Arrays<Slot>>();
    return made;
}

}  // namespace rekindle
