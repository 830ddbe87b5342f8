// Registers which memory of the program is being read, so that it is not evicted meanwhile.
//
// An operator releases the session mutex before its kernel runs, and often earlier. Meanwhile
// another thread may evict values. It evicts a user-held value only if no registered reader uses
// that value. With `evict="anything"`, locks on engine storages protect operands instead; see
// `held_eviction.h`.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace rekindle {

using StorageList = c10::SmallVector<const c10::StorageImpl*, 8>;

class Readers;

// Base class of scopes that read memory of the program, so that this memory is not evicted. All
// members need the session mutex.
class Reader {
public:
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    Reader(Reader&&) = delete;
    Reader& operator=(Reader&&) = delete;
    virtual ~Reader() = default;

    // Add the storages that this reader uses to `read`.
    virtual void note_read(StorageList& read) const = 0;

    // Return true if this reader may also read any value that autograd saved.
    virtual bool reads_saved() const { return false; }

protected:
    Reader() = default;

private:
    friend class Readers;

    Reader* before_ = nullptr;
    Reader* after_ = nullptr;
};

// List of all scopes that read memory of the program now. All members need the session mutex.
class Readers final {
public:
    void add(Reader& reader) noexcept {
        reader.after_ = first_;
        if (first_ != nullptr) [[unlikely]] {
            first_->before_ = &reader;
        }
        first_ = &reader;
    }

    void remove(Reader& reader) noexcept {
        Reader*& before = reader.before_ == nullptr ? first_ : reader.before_->after_;
        before = reader.after_;
        if (reader.after_ != nullptr) [[unlikely]] {
            reader.after_->before_ = reader.before_;
        }
    }

    template <class F>
    void each(F&& visit) const {
        for (const Reader* reader = first_; reader != nullptr; reader = reader->after_) {
            visit(*reader);
        }
    }

private:
    Reader* first_ = nullptr;
};

}  // namespace rekindle
