// One call of an operator within a budget: prepares its inputs, makes room, runs it, and records
// its results.
//
// dispatch/runtime.cpp creates one `Operation` per call. Its methods are defined in operation.cpp
// (the main steps, and results), operation_inputs.cpp, operation_execute.cpp (running the kernel),
// operation_pinned.cpp (`evict="anything"`), sliced_operation.cpp and trial.cpp.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "../base/mutex.h"
#include "../memory/evict_held_last.h"
#include "../memory/held/held_eviction.h"
#include "../memory/session.h"
#include "../ops/operator_call.h"
#include "../ops/parsed_call.h"
#include "../torch/parts.h"
#include "../torch/rng_history.h"
#include "effects.h"

namespace rekindle {

// An operator call in progress, with one method per step. While this object lives, the operands of
// the call are not evicted.
class Operation final : public Reader {
public:
    Operation(
        Session& session, const Facts& facts, OperatorCall& call, Locked& lock, bool grad_mode
    )
        : session_(session),
          facts_(facts),
          call_(call),
          lock_(lock),
          grad_mode_(grad_mode),
          parsed_(facts) {}

    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    Operation(Operation&&) = delete;
    Operation& operator=(Operation&&) = delete;

    ~Operation() override {
        if (begun_) {
            session_.held.ends(*this);
        }
    }

    // Run the operator. `now`: the current stream, on a device that has streams.
    void run(const std::optional<c10::Stream>& now);
    void note_read(StorageList& read) const override;

private:
    // A result of the operator in newly allocated memory, with its position among the results.
    struct Made final {
        std::uint32_t position;
        c10::TensorImpl* tensor;
        c10::StorageImpl* storage_impl;
    };

    // An input without a recipe. memory: set while the operator runs.
    struct Source final {
        Ref<Storage> record;
        StoragePtr memory;
    };

    // State that few operators need.
    struct Rare final {
        // Storages without a recipe that the operator writes, and that recipes of other values
        // read.
        c10::SmallVector<StorageRecord*, 1> fixed;
        // private copies of inputs that other code may write
        c10::SmallVector<StoragePtr, 1> copies;
        // Finds side effects of an operator whose recomputation is not trusted yet.
        std::optional<Effects> effects;
        RngCheckpoints random;
        // Full states of the CPU's generators in `random`, before an operator that is tried runs.
        std::vector<std::unique_ptr<Random>> before;
    };

    // All results of an operator in newly allocated memory. nbytes: their total, as the budget
    // counts it. non_strided_result: some result is not a plain strided tensor. quantized: some
    // result is quantized.
    struct Results final {
        c10::SmallVector<Made, 4> made;
        // keeps the parts of sparse results (indices, values) alive until they are registered
        Parts parts;
        Bytes nbytes = 0;
        bool non_strided_result = false;
        bool quantized = false;
        bool external = false;  // PyTorch did not allocate the memory of some result
    };

    // Methods that are declared `inline` are only called in the file that defines them.
    inline void run_as_it_may();
    bool run_in_slices_at_once();
    bool run_in_slices(bool observed);
    void run_whole();
    void run_with_inputs();
    void run_pinned();
    inline void decide_in_place();
    bool may_let_go();
    void let_results_return();

    // Run `step`. If its memory does not fit into the budget, run it once more while user-held
    // values may be evicted.
    template <class Step>
    void retry_evicting_held(Step&& step) {
        // With `evict="anything"`, `run_pinned` or `run_in_slices` has already made user-held
        // values candidates for eviction.
        if (session_.held.eviction) [[unlikely]] {
            or_without_copies(session_.frees, lock_, [&] {
                session_.held.eviction->attempt(step);
            });
            return;
        }
        rekindle::retry_evicting_held(session_, lock_, step);
    }

    void keep_inputs_there();
    inline bool may_only_count();
    inline void only_count();
    void order_counted();
    void order(std::uint32_t position, const c10::StorageImpl& storage_impl, StorageRecord& record);
    void note_writer();
    void prune_history();
    void know_inputs();
    void register_tensor();
    void resolve_content_flags(std::uint32_t position);
    bool reads_unwritten(std::uint32_t position);
    bool copies_within(UnwrittenBytes& unwritten);
    bool is_first_write();
    bool note_written_bytes(std::uint32_t position);
    void keep_indices();
    void expect_raised_versions();
    void save_what_is_overwritten();
    void need(Need need);
    inline void predict();
    bool fits_in_any_case();

    // Return true if the predicted results and the operator's workspace fit into the budget without
    // evicting anything.
    bool fits() const {
        const Engine& engine = session_.engine;
        const Bytes wanted = needed_ + inside_ + session_.room.kept_back(needed_ + inside_);
        return wanted <= engine.budget - engine.memory - engine.in_flight;
    }

    bool take_private_inputs();
    inline void make_room();
    inline void find_places();
    inline void enforce_budget();
    void swap_ahead();
    inline void draw();
    c10::Device where() const;
    template <class F>
    void each_source(F&& visit);
    void hold_sources();
    void own_sources();
    void let_go_of_sources();
    void call();
    inline bool may_be_refused() const;
    inline bool may_run_again() const;
    bool find_room_inside(Bytes nbytes);
    void call_until_it_fits(bool refusable);
    inline Bytes attempt(Bytes limit, c10::SmallVectorImpl<c10::IValue>* arguments);
    bool rescued(const std::exception& error, std::span<const c10::IValue> arguments);
    template <class Kernel>
    void run_unlocked(Kernel&& kernel);
    template <class Work>
    void run_locked(Work&& work);
    inline void redispatch(bool priced);
    inline void run_priced(bool priced);
    inline void run_kernel();
    void priced_by_events();
    bool may_differ() const;
    bool is_trusted_or_tried();
    bool has_moved(const RngCheckpoint& checkpoint) const;
    void keep_moved_generators();
    void look_for_effects();
    void stand_trial();
    void try_again();
    void compare_runs(const torch::jit::Stack& again, std::span<const StoragePtr> storages);
    bool find_room_for_trial(Bytes nbytes);
    void interrupted(std::exception& error);
    Results gather_results();
    inline void register_results();
    bool inputs_can_be_had() const;
    bool has_moved(const c10::StorageImpl& storage_impl);
    inline void register_made(std::span<const Made> made, Nanoseconds cost);
    bool look_up_written();
    bool written_over(bool recording, Bytes results);
    void link(Recipe& call, bool statistics, bool first_is_last);
    bool is_written(std::uint32_t position) const noexcept;

    // Return the boxed arguments of a call that has not run yet.
    std::span<const c10::IValue> boxed_arguments() const {
        return last_values(call_.stack(), facts_.arguments);
    }

    // Return the results of the call.
    std::span<const c10::IValue> returned() const { return call_.results(facts_.returns); }

    // Return the state that few operators need. Create it if this operator has none yet.
    Rare& rare() {
        if (!rare_) {
            rare_ = std::make_unique<Rare>();
        }
        return *rare_;
    }

    // Return what looks for side effects of this operator; null if nothing does.
    Effects* effects() noexcept {
        if (!rare_) [[likely]] {
            return nullptr;
        }
        return rare_->effects ? &*rare_->effects : nullptr;
    }

    // Return the states of the random generators that the operator draws from.
    std::span<const std::unique_ptr<RngCheckpoint>> random() const noexcept {
        if (!rare_) [[likely]] {
            return {};
        }
        return rare_->random;
    }

    StorageRecord* input(std::size_t position) noexcept {
        return static_cast<StorageRecord*>(inputs_[position].get());
    }

    Session& session_;
    const Facts& facts_;
    OperatorCall& call_;
    Locked& lock_;
    Bytes needed_ = 0;  // predicted bytes of the results
    // predicted bytes of the operator's workspace, which the kernel allocates and frees itself
    Bytes inside_ = 0;
    std::unique_ptr<Rare> rare_;
    StreamIndex stream_ = 0;  // stream that the operator runs on
    const bool grad_mode_;    // grad mode was on when the operator was called
    bool begun_ = false;      // this operation is registered as a `Reader`
    bool started_ = false;    // the kernel may have taken its arguments off the stack
    bool recording_ = false;
    // The results get a recipe only if a trial recomputation gives the same bits.
    bool tried_ = false;
    // For traces: the result would be written over an argument if Rekindle's own dispatch mode were
    // off.
    bool would_take_over_ = false;
    bool foreign_ = false;  // other code than PyTorch may write some input
    bool guessed_ = false;  // `needed_` is only an upper bound of the bytes of the results
    bool bounded_ = false;  // `needed_` is the upper bound of `most_bytes`
    ParsedCall parsed_;
    // storage records of the tensor arguments; null for an argument without memory
    c10::SmallVector<Ref<Storage>, 6> inputs_;
    // The inputs that are sources (values without a recipe). This object holds their memory until
    // the recipe of the operator exists.
    c10::SmallVector<Source, 4> sources_;
};

}  // namespace rekindle
