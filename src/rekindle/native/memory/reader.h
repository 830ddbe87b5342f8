// Who reads memory of the program's just now, in whatever thread: it stays there meanwhile.
//
// An operator gives the lock back before it runs, and often before that. So what variables hold is
// evicted by one thread only if no reader of any thread is at it. (With `evict="anything"` the
// engine's own locks say so: `any_time.h`.)
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace rekindle {

using Homes = c10::SmallVector<const c10::StorageImpl*, 8>;

class Readers;

// With the lock.
class Reader {
public:
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    Reader(Reader&&) = delete;
    Reader& operator=(Reader&&) = delete;
    virtual ~Reader() = default;

    // Adds the storages that it reads.
    virtual void note_read(Homes& read) const = 0;

    // Whether it may read all that autograd saved as well.
    virtual bool reads_saved() const { return false; }

protected:
    Reader() = default;

private:
    friend class Readers;

    Reader* before_ = nullptr;
    Reader* after_ = nullptr;
};

// All there are now. With the lock.
class Readers final {
public:
    void add(Reader& reader) noexcept {
        reader.after_ = first_;
        if (first_ != nullptr) {
            first_->before_ = &reader;
        }
        first_ = &reader;
    }

    void remove(Reader& reader) noexcept {
        (reader.before_ == nullptr ? first_ : reader.before_->after_) = reader.after_;
        if (reader.after_ != nullptr) {
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
