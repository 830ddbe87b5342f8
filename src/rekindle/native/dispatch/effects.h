// Finds side effects of operators that are not PyTorch's own. An operator with side effects is
// never recomputed.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/session.h"
#include "../ops/operator_call.h"
#include "../torch/thread_state.h"

namespace rekindle {

// Observes one call of an operator that is not PyTorch's own and not trusted yet. While this object
// lives, every inner operator (one that the kernel calls) goes through `run`. Inner operators get
// no recipe. These side effects are noted: writes to memory that was not made inside the kernel,
// random numbers from a generator of the program's own, and communication with other processes.
// Each such write is also registered as a write without a recipe, so that other values stay correct
// (R3, in-place writes; R4, sources).
class Effects final {
public:
    // inputs: storages that the operator reads and must not write. Comparing their checksums shows
    // writes by kernels that call no operator. If empty, only inner operators are observed.
    Effects(Session& session, std::span<const StoragePtr> inputs);
    Effects(const Effects&) = delete;
    Effects& operator=(const Effects&) = delete;
    Effects(Effects&&) = delete;
    Effects& operator=(Effects&&) = delete;
    // The session mutex must be held.
    ~Effects();

    // Observe a call of the operator `facts` with these arguments, which may draw from the
    // generator among them. Reads of other tensors than the arguments are noted as well, and Python
    // watches the call (`watch_begins`).
    void expect(const Facts& facts, std::span<const c10::IValue> arguments);

    // Scope in which `effects` checks each operator that this thread calls for side effects. If
    // `effects` is null, no operator is checked.
    class Watching final {
    public:
        explicit Watching(Effects* effects);
        Watching(const Watching&) = delete;
        Watching& operator=(const Watching&) = delete;
        Watching(Watching&&) = delete;
        Watching& operator=(Watching&&) = delete;
        ~Watching();

        // Note what Python saw. Called once the operator has run without an error.
        void end();

    private:
        Effects* const effects_;
        Effects* const before_;
        const ScopedWithoutCastCache without_cache_;
        bool python_ = false;  // Python watches this thread
    };

    // Return the `Effects` object that checks the operators of this thread, or null if none does.
    static Effects* current() noexcept;

    // Check an operator that the observed kernel calls for side effects, and run the operator. The
    // session mutex is released while the operator runs.
    void run(const Facts& facts, OperatorCall& call, Locked& lock);

    // Register that the operator `name` writes `tensor`: an operator that the observed kernel
    // calls, or the observed operator itself, if it is known to write arguments without declaring
    // it.
    void about_to_write(const c10::TensorImpl& tensor, const std::string& name);

    // Return a side effect of the observed kernel as text, or "" if it had none. Must be called
    // after the kernel has run.
    std::string found();

    // Let `probation` watch all later calls, if the kernel read or wrote memory that is not its
    // own.
    void report_to(Probation& probation) const;

private:
    using Storages = std::unordered_set<const c10::StorageImpl*>;

    void look_at(const Facts& facts, OperatorCall& call);
    bool is_given(const c10::TensorImpl& tensor) const;
    void has_changed(const StoragePtr& storage_impl);

    Session& session_;
    // Checksums of the operator's inputs before the kernel ran.
    std::vector<std::pair<StoragePtr, std::uint64_t>> checksums_;
    // Storages made inside the observed kernel. Some may be freed already.
    Storages made_;
    std::optional<Storages> given_;  // storages of the arguments; none if any memory may be read
    at::Generator generator_;        // the generator among the arguments
    std::string name_;  // name of the operator that Python watches; empty if Python does not
    std::string found_;
    std::string
        read_;  // an operator that read another tensor than the arguments; empty if none did
    bool has_written_ = false;  // an operator wrote memory that the kernel did not make
    bool has_changed_ = false;  // an argument changed, although no operator wrote it
};

}  // namespace rekindle
