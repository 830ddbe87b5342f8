// Hash map from addresses to entries of type `T`. The map uses open addressing, linear probing, and
// removal by backward shift (Knuth, The Art of Computer Programming 6.4, algorithm R). It is not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace rekindle {

template <class T>
class AddressMap final {
public:
    // Return the entry at `key`, or null if the map has none. The pointer is valid until the next
    // insertion or removal.
    T* find(const void* key) noexcept {
        std::size_t i = ideal(key);
        while (slots_[i].key != key) [[unlikely]] {
            if (slots_[i].key == nullptr) {
                return nullptr;
            }
            i = (i + 1) & mask();
        }
        return &slots_[i].thing;
    }

    // Return the entry at `key`. Insert a default entry if the map has none.
    T& at(const void* key) {
        if (T* found = find(key)) {
            return *found;
        }
        return add(key, T{});
    }

    // Insert `thing` at `key`. The map must have no entry there. Return the new entry.
    T& add(const void* key, T thing) {
        if (2 * (n_ + 1) > slots_.size()) {
            grow();
        }
        ++n_;
        return place(key, std::move(thing));
    }

    // Set the entry at `key` to `thing`, also if the map has an entry there.
    void put(const void* key, T thing) { at(key) = std::move(thing); }

    // Remove the entry at `key`, if the map has one.
    void take(const void* key) noexcept {
        std::size_t hole = ideal(key);
        while (slots_[hole].key != key) {
            if (slots_[hole].key == nullptr) {
                return;
            }
            hole = (hole + 1) & mask();
        }
        --n_;
        for (std::size_t i = (hole + 1) & mask(); slots_[i].key != nullptr; i = (i + 1) & mask()) {
            if (((i - ideal(slots_[i].key)) & mask()) >= ((i - hole) & mask())) {
                slots_[hole] = std::move(slots_[i]);
                hole = i;
            }
        }
        slots_[hole] = Slot{};
    }

    std::size_t size() const noexcept { return n_; }

    // Call `visit(key, entry)` for each entry, in unspecified order.
    template <class F>
    void each(F&& visit) {
        for (const Slot& slot : slots_) {
            if (slot.key != nullptr) {
                visit(slot.key, slot.thing);
            }
        }
    }

private:
    static constexpr std::size_t AT_FIRST = 1024;

    struct Slot final {
        const void* key = nullptr;
        T thing{};
    };

    std::size_t mask() const noexcept { return slots_.size() - 1; }

    std::size_t ideal(const void* key) const noexcept {
        const auto number = reinterpret_cast<std::uintptr_t>(key) >> 4;
        return static_cast<std::size_t>((number * 0x9E3779B97F4A7C15ULL) >> 24) & mask();
    }

    T& place(const void* key, T thing) {
        std::size_t i = ideal(key);
        while (slots_[i].key != nullptr) {
            i = (i + 1) & mask();
        }
        slots_[i] = Slot{key, std::move(thing)};
        return slots_[i].thing;
    }

    void grow() {
        std::vector<Slot> before(2 * slots_.size());
        before.swap(slots_);
        for (const Slot& slot : before) {
            if (slot.key != nullptr) {
                place(slot.key, std::move(slot.thing));
            }
        }
    }

    std::vector<Slot> slots_{AT_FIRST};
    std::size_t n_ = 0;
};

}  // namespace rekindle
