// Reference-counted pointers to the storages and calls of one engine. The counts are plain
// integers, guarded by the lock that guards the engine.
//
// An object whose count drops to zero is not destroyed at once. It joins a list, a
// `DeferredDeletes`, which the engine's ledger empties at the end of an event. So chains of
// thousands of objects are destroyed without recursion, and plain pointers stay valid during an
// event.
#pragma once

#include <cstdint>
#include <utility>

#include "assert.h"

namespace rekindle {

template <class T>
class DeferredDeletes;

// Base class of reference-counted objects. A new object has count 0, but is not yet in a list of
// objects to destroy.
template <class T>
struct Counted {
    explicit Counted(DeferredDeletes<T>& storage_impl) : graveyard(&storage_impl) {}

    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

    union {
        // List that the object joins when its count drops to zero. Valid while the count is not
        // zero.
        DeferredDeletes<T>* graveyard;
        T* next_dead;  // Next object in the list, once this object has joined it.
    };

    std::uint32_t count = 0;

protected:
    ~Counted() = default;
};

template <class T>
// List of objects to destroy, linked through the objects.
class DeferredDeletes {
public:
    void defer(T& dead) noexcept {
        dead.next_dead = first_;
        first_ = &dead;
    }

    bool any() const noexcept { return first_ != nullptr; }

    // Remove one object from this list and return it, for the caller to destroy; null if the list
    // is empty.
    T* take() noexcept {
        T* found = first_;
        if (found != nullptr) {
            first_ = found->next_dead;
        }
        return found;
    }

private:
    T* first_ = nullptr;
};

// `hold` increments the reference count of `object`, and `let` decrements it. `Ref` calls `hold`
// when it begins to refer to an object, and `let` when it stops.
template <class T>
void hold(T& object) noexcept {
    ++object.count;
}

template <class T>
void let(T& object) noexcept {
    REKINDLE_ASSERT(object.count > 0);
    if (--object.count == 0) [[unlikely]] {
        object.graveyard->defer(object);
    }
}

template <class T>
// Owning pointer to a reference-counted object, or null.
class Ref {
public:
    Ref() = default;

    explicit Ref(T* object) noexcept : object_(object) {
        if (object_ != nullptr) [[likely]] {
            hold(*object_);
        }
    }

    Ref(const Ref& other) noexcept : Ref(other.object_) {}

    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}

    Ref& operator=(const Ref& other) noexcept {
        Ref copy(other);
        std::swap(object_, copy.object_);
        return *this;
    }

    Ref& operator=(Ref&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }

    ~Ref() {
        if (object_ != nullptr) {
            let(*object_);
        }
    }

    T* get() const noexcept { return object_; }

    T* operator->() const noexcept { return object_; }

    T& operator*() const noexcept { return *object_; }

    explicit operator bool() const noexcept { return object_ != nullptr; }

private:
    T* object_ = nullptr;
};

}  // namespace rekindle
