#include "proxy.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>
#include <vector>

#include "../base/slab.h"
#include "../torch/backward.h"
#include "../torch/dispatch_key.h"
#include "../torch/private_generators.h"
#include "../torch/versions.h"
#include "saved_tensor_handle.h"

namespace rekindle {

namespace {

namespace autograd = torch::autograd;

// Forwards all calls to autograd's engine (all its public virtual functions), except that it
// returns Rekindle's hooks for saved tensors. It also notes which threads run a backward pass.
class Proxy final : public autograd::Engine {
public:
    explicit Proxy(autograd::Engine& behind) : behind_(behind) {}

    Proxy(const Proxy&) = delete;
    Proxy& operator=(const Proxy&) = delete;
    Proxy(Proxy&&) = delete;
    Proxy& operator=(Proxy&&) = delete;
    ~Proxy() override = default;

    autograd::variable_list execute(
        const autograd::edge_list& roots,
        const autograd::variable_list& inputs,
        bool keep_graph,
        bool create_graph,
        bool accumulate_grad,
        const autograd::edge_list& outputs
    ) override {
        rejoin();
        const BackwardPass pass;
        return behind_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    }

    c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
        const std::shared_ptr<autograd::GraphTask>& task,
        NodePointer root,
        autograd::InputBuffer&& input
    ) override {
        return behind_.execute_with_graph_task(task, std::move(root), std::move(input));
    }

    std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
        return behind_.make_anomaly_metadata();
    }

    std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
        // Return Rekindle's hooks only if the program has set none: saved-tensor hooks and
        // checkpoints of the program take precedence. A graph that a recomputed operator makes
        // within itself has none. Fake tensors have no contents to recompute.
        if (PrivateGenerators::current() == nullptr &&
            !c10::impl::tls_is_dispatch_key_excluded(KEY) && rejoin() &&
            at::SavedTensorDefaultHooks::get_tls_state().stack.empty() &&
            !(shares_key && is_in_fake_mode())) {
            if (c10::intrusive_ptr<Session> session = active(); session) {
                return std::make_unique<SavedTensorHandle>(std::move(session));
            }
        }
        return behind_.get_default_saved_variable_hooks();
    }

#if REKINDLE_ENGINE_HAS_NODE_HOOKS
    std::vector<std::unique_ptr<autograd::NodeCreationHook>> get_node_creation_hooks() override {
        return behind_.get_node_creation_hooks();
    }
#endif

    void thread_on_exception(
        const std::shared_ptr<autograd::GraphTask>& task,
        const NodePointer& node,
        std::exception& error
    ) override {
        behind_.thread_on_exception(task, node, error);
    }

    void thread_init(
        int device, const std::shared_ptr<autograd::ReadyQueue>& queue, bool should_increment
    ) override {
        behind_.thread_init(device, queue, should_increment);
    }

private:
    autograd::Engine& behind_;
};

Proxy*& the_proxy() noexcept {
    static Proxy* made = nullptr;
    return made;
}

autograd::Engine& stub() {
    return *the_proxy();
}

}  // namespace

void install_engine_proxy() {
    // The proxy is never destroyed: like autograd's engine, it outlives Python.
    if (the_proxy() == nullptr) {
        the_proxy() = &leaky_singleton<Proxy>(autograd::Engine::get_default_engine());
        autograd::set_default_engine_stub(&stub);
    }
}

}  // namespace rekindle
