// A policy written in Python: the engine's events go to an object of the program's, which chooses.
#pragma once

#include <atomic>
#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "../engine/chooser.h"

// As Python.h has it.
struct _object;

namespace rekindle {

class Driver;

// Twin of the base class in rekindle.policies._base. The program's code never runs with the core's
// lock. So what the engine tells is kept in a list, in order, and Python hears of it before it is
// asked, or at the end of an operator (`tell`). It is asked within `Consulting`: others may come
// meanwhile, and if its answer is no candidate any more, it is asked anew.
//
// Python has one question or one piece of news at a time. While it has, another thread that needs
// room evicts what was used longest ago: to wait for the answer might be to wait for ever.
class PythonChooser final : public Chooser {
public:
    // `object`: a `rekindle.policies.Chooser`. With the GIL.
    explicit PythonChooser(_object* object);
    PythonChooser(const PythonChooser&) = delete;
    PythonChooser& operator=(const PythonChooser&) = delete;
    PythonChooser(PythonChooser&&) = delete;
    PythonChooser& operator=(PythonChooser&&) = delete;
    ~PythonChooser() override;

    // Whose engine asks.
    void choose_for(Driver& driver) noexcept { driver_ = &driver; }

    bool remembers() const override { return remembers_; }

    void add(Storage& storage) override {
        candidates_.insert(&storage);
        hear("add", storage);
    }

    void remove(Storage& storage) override {
        candidates_.erase(&storage);
        hear("remove", storage);
    }

    // Throws what Python raises.
    Storage* choose(Nanoseconds now) override;

    // Nothing is put off but what `tell` tells.
    void catch_up(Nanoseconds /*now*/) override {}

    // As Python said when it chose `storage`; its cost if it did not.
    Nanoseconds recompute_ns(Storage& storage) override {
        return priced_ == &storage ? price_ : storage.cost;
    }

    // As Python said when `ask_losses` asked; its own cost over its staleness if it did not.
    double loss(Storage& storage, Nanoseconds now) override;

    void expected(Storage& storage) override { hear("expected", storage); }

    void evicted(Storage& storage) override { hear("evicted", storage); }

    void returned(Storage& storage) override { hear("returned", storage); }

    void forgotten(Storage& storage) override { hear("forgotten", storage); }

    void touched(Storage& storage) override { hear("touched", storage); }

    void repriced(Storage& storage) override { hear("repriced", storage); }

    void disposed(Storage& storage) noexcept override;

    // Tells Python what happened, and throws what that raises. Without the core's lock.
    void tell() {
        if (any_news_.load(std::memory_order_relaxed)) {
            tell_now();
        }
    }

    // Asks Python what evicting each candidate would cost at clock `now`, whatever its size.
    void ask_losses(Nanoseconds now);

    // What Python knows `storage` by, one object as long as it lives; a borrowed reference. With
    // the core's lock and the GIL; null: Python raised.
    _object* view_of(Storage& storage);

private:
    // Of the engine, which Python has not heard of yet.
    struct News final {
        const char* method;
        Ref<Storage> storage;
    };

    // What Python answered: nothing, or a storage; or it was none that may be chosen.
    struct Answer final {
        Storage* storage = nullptr;
        bool stale = false;
    };

    class Busy;

    void hear(const char* method, Storage& storage);
    void tell_now();
    void tell_all();
    _object* next_news(const char*& method);
    Answer ask(Nanoseconds now);
    Storage* oldest() const noexcept;

    _object* object_;
    Driver* driver_ = nullptr;
    bool remembers_ = false;
    bool busy_ = false;  // Python is asked, or told, by some thread
    std::unordered_map<const Storage*, _object*> views_;
    std::unordered_set<Storage*> candidates_;
    std::deque<News> news_;
    std::atomic<bool> any_news_ = false;
    const Storage* priced_ = nullptr;  // what was chosen last, and what recomputing it takes
    Nanoseconds price_ = 0;
    std::unordered_map<const Storage*, double> losses_;
};

}  // namespace rekindle
