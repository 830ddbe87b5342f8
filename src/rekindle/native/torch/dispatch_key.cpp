#include "dispatch_key.h"

#include <c10/util/Exception.h>
#if __has_include(<c10/core/impl/FakeTensorModeTLS.h>)
#include <c10/core/impl/FakeTensorModeTLS.h>
#define REKINDLE_HAS_FAKE_MODE 1
#endif

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/slab.h"
#include "pyobjects.h"

namespace rekindle {

namespace {

// Keys with smaller numbers come later in dispatch order.
constexpr bool comes_after(c10::DispatchKey one, c10::DispatchKey other) {
    return static_cast<int>(one) < static_cast<int>(other);
}

// The runtime sees the operators that autograd runs, and factory functions and sparse tensors too.
static_assert(comes_after(KEY, c10::DispatchKey::AutogradFunctionality));
static_assert(comes_after(c10::DispatchKey::BackendSelect, KEY));
// A recomputation starts below `KEY`, and still passes `REPLAY_KEY`.
static_assert(comes_after(REPLAY_KEY, KEY));

// True once `open_replay_key` has succeeded, before any operator is recomputed.
bool& replay_key_is_open() noexcept {
    static constinit bool is_open = false;
    return is_open;
}

// Register kernels of operators that were defined. Python calls this in the main thread.
int take_over_soon(void* /*unused*/) {
    take_over_new_operators();
    return 0;
}

// What the core knows of a dispatch key at which PyTorch has kernels too (`shares_key`).
class SharedKey final {
public:
    MakeKernel make = nullptr;
    std::atomic<bool> any_defined = false;

    // Return PyTorch's kernel of `op`.
    const c10::SafeKernelFunction& kernel_behind(const c10::OperatorHandle& op) {
        const std::scoped_lock guard(mutex_);
        const auto found = own_.find(op.operator_name());
        return found == own_.end() ? *fallback_ : found->second;
    }

    // Note PyTorch's kernel of the operator `name`, which the core is about to cover by its own.
    // Return false if the core has done that already, or the operator is gone.
    bool cover(const c10::OperatorName& name) {
        const std::scoped_lock guard(mutex_);
        const auto op = c10::Dispatcher::singleton().findSchema(name);
        if (!op || !covered_.insert(name).second) {
            return false;
        }
        if (op->hasKernelForDispatchKey(KEY)) {
            own_.insert_or_assign(name, op->getComputedKernelForDispatchKey(KEY));
        } else if (!fallback_) {
            fallback_ =
                std::make_unique<c10::SafeKernelFunction>(op->getComputedKernelForDispatchKey(KEY));
        }
        return true;
    }

    // Note that the operator `name` was defined. PyTorch's dispatcher calls this with its lock
    // held, so no kernel can be registered here. Python registers it as soon as the call returns
    // that has defined the operator, if that is the main thread; else it is done at the next
    // operator of any thread (`take_over_new_operators`).
    void note_defined(c10::OperatorName name) {
        const std::scoped_lock guard(mutex_);
        defined_.push_back(std::move(name));
        if (!any_defined.exchange(true, std::memory_order_relaxed)) {
            call_soon(&take_over_soon);
        }
    }

    std::vector<c10::OperatorName> take_defined() {
        const std::scoped_lock guard(mutex_);
        any_defined.store(false, std::memory_order_relaxed);
        return std::exchange(defined_, {});
    }

private:
    std::mutex mutex_;
    std::unique_ptr<const c10::SafeKernelFunction> fallback_;
    std::unordered_map<c10::OperatorName, c10::SafeKernelFunction> own_;  // not the fallback
    std::unordered_set<c10::OperatorName> covered_;
    std::vector<c10::OperatorName> defined_;  // since the last call of `take_defined`
};

SharedKey& shared() {
    static auto& made = leaky_singleton<SharedKey>();
    return made;
}

// Collects the names of operators that are defined. The dispatcher also tells a new listener about
// all operators that there are.
class DefinitionListener final : public c10::OpRegistrationListener {
public:
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
        shared().note_defined(op.operator_name());
    }

    void onOperatorDeregistered(const c10::OperatorHandle& /*op*/) override {}
};

// Return a library through which kernels for `key` are registered, of operators in the namespace
// `name_space` ("_": of all operators). The library is never destroyed.
torch::Library& library_at_key(const std::string& name_space, c10::DispatchKey key) {
    static std::mutex mutex;
    static auto& made =
        leaky_singleton<std::map<std::pair<std::string, c10::DispatchKey>, torch::Library*>>();
    const std::scoped_lock guard(mutex);
    torch::Library*& found = made[{name_space, key}];
    if (found == nullptr) {
        found = &leaky_singleton<torch::Library>(
            torch::Library::IMPL, name_space, key, __FILE__, __LINE__
        );
    }
    return *found;
}

class SilentHandler final : public c10::WarningHandler {
public:
    void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

void look_behind() {
    shares_key = c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(KEY);
}

void register_at_key(MakeKernel make) {
    if (!shares_key) {
        library_at_key("_", KEY).fallback(make());
        return;
    }
    shared().make = make;
    leaky_singleton<c10::RegistrationHandleRAII>(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<DefinitionListener>())
    );
    take_over_new_operators();
}

void register_kernel(
    const c10::OperatorName& name, torch::CppFunction&& kernel, c10::DispatchKey key
) {
    if (key == KEY && shares_key && !shared().cover(name)) {
        return;
    }
    // The dispatcher warns if PyTorch has a kernel for this operator alone. That is on purpose.
    SilentHandler silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    const std::string name_space(name.name, 0, name.name.find("::"));
    library_at_key(name_space, key).impl(c10::toString(name).c_str(), std::move(kernel));
}

void take_over_new_operators() {
    if (!shared().any_defined.load(std::memory_order_relaxed)) {
        return;
    }
    for (const c10::OperatorName& name : shared().take_defined()) {
        register_kernel(name, shared().make());
    }
}

bool is_in_fake_mode() noexcept {
#ifdef REKINDLE_HAS_FAKE_MODE
    return c10::impl::FakeTensorModeTLS::get_state() != nullptr;
#else
    return false;
#endif
}

void call_kernel_behind(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack
) {
    shared().kernel_behind(op).callBoxed(op, keys, &stack);
}

bool open_replay_key() {
    if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(REPLAY_KEY)) {
        library_at_key("_", REPLAY_KEY).fallback(torch::CppFunction::makeFallthrough());
        replay_key_is_open() = true;
    }
    return replay_key_is_open();
}

c10::DispatchKeySet replay_keys() noexcept {
    return replay_key_is_open() ? c10::DispatchKeySet(REPLAY_KEY) : c10::DispatchKeySet();
}

}  // namespace rekindle
