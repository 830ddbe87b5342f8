// The words of a signature's key, while a call is parsed.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace rekindle {

// The key of a call's signature. A training step repeats its calls, so the key usually equals the
// key that is expected. Then its words are only compared, and not stored.
class CallKey final {
public:
    // Expect the words of `key`, which must stay alive while words are added.
    void expect(std::span<const std::int64_t> key) noexcept {
        first_ = key.data();
        next_ = first_;
        end_ = first_ + key.size();
    }

    void push_back(std::int64_t word) {
        if (next_ != end_ && *next_ == word) [[likely]] {
            ++next_;
        } else {
            store(word);
        }
    }

    // Add `head`, `offset`, and the words of `sizes` and `strides` in turn.
    void push_tensor(
        std::int64_t head,
        std::int64_t offset,
        std::span<const std::int64_t> sizes,
        std::span<const std::int64_t> strides
    ) {
        const std::int64_t* next = next_;
        if (end_ - next >= static_cast<std::ptrdiff_t>(2 + 2 * sizes.size())) {
            bool same = *next++ == head;
            same = *next++ == offset && same;
            for (std::size_t i = 0; i < sizes.size(); ++i) {
                same = *next++ == sizes[i] && same;
                same = *next++ == strides[i] && same;
            }
            if (same) [[likely]] {
                next_ = next;
                return;
            }
        }
        store(head);
        store(offset);
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            store(sizes[i]);
            store(strides[i]);
        }
    }

    void pop_back() {
        stop_comparing();
        words_.pop_back();
    }

    // Return true if the words are those of the expected key.
    bool is_as_expected() const noexcept { return first_ != nullptr && next_ == end_; }

    // Return all words.
    std::span<const std::int64_t> words() {
        stop_comparing();
        return {words_.data(), words_.size()};
    }

private:
    [[gnu::noinline]] void store(std::int64_t word) {
        stop_comparing();
        words_.push_back(word);
    }

    void stop_comparing() {
        words_.append(first_, next_);
        first_ = next_ = end_ = nullptr;
    }

    // The expected key. The words before `next_` are equal. Null if nothing is expected any more.
    const std::int64_t* first_ = nullptr;
    const std::int64_t* next_ = nullptr;
    const std::int64_t* end_ = nullptr;
    c10::SmallVector<std::int64_t, 64> words_;  // empty while words are compared
};

}  // namespace rekindle
