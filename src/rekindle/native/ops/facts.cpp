#include "facts.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "../base/address_map.h"
#include "../base/slab.h"

namespace rekindle {

namespace {

struct Tables final {
    std::vector<std::pair<std::string, Traits>> traits;
    std::vector<std::string> effects;
    std::vector<std::string> own;
    std::vector<std::string> products;
    std::vector<std::string> may_use_workspace;
    std::vector<std::unique_ptr<const InPlace>> in_place;
    AddressMap<Facts*> known;
    Slab<Facts> facts;
};

// Schema of an operator that was removed from the dispatcher (its library was unloaded).
struct Removed final {
    const void* schema;
    Removed* next;
};

// Stack of removed schemas that `forget_removed` has not processed yet. Any thread may push to this
// stack without a lock.
std::atomic<Removed*>& removed() noexcept {
    static constinit std::atomic<Removed*> first;
    return first;
}

// Listener to which the dispatcher reports removed operators, in any thread.
class Listener final : public c10::OpRegistrationListener {
public:
    void onOperatorRegistered(const c10::OperatorHandle& /*op*/) override {}

    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
        auto* made = std::make_unique<Removed>(&op.schema(), nullptr).release();
        made->next = removed().load(std::memory_order_relaxed);
        while (!removed().compare_exchange_weak(made->next, made, std::memory_order_release)) {
        }
    }
};

// Return the tables of operators. Never destroyed: operators also run while the process ends.
Tables& tables() {
    static auto& made = leaky_singleton<Tables>();
    return made;
}

Traits traits_of(std::string_view name) {
    for (const auto& [known, traits] : tables().traits) {
        if (known == name) {
            return traits;
        }
    }
    return {};
}

// Return true if the operator `name` is in one of the namespaces `spaces`.
bool is_in(const std::vector<std::string>& spaces, std::string_view name) {
    return std::ranges::find(spaces, name.substr(0, name.find("::"))) != spaces.end();
}

void read_arguments(Facts& facts, const c10::FunctionSchema& schema) {
    bool first = true;
    for (std::uint32_t i = 0; i < facts.arguments; ++i) {
        const c10::Argument& argument = schema.arguments()[i];
        const c10::AliasInfo* alias = argument.alias_info();
        if (alias == nullptr || !alias->isWrite() || facts.moves) {
            continue;
        }
        if (i < 64) {
            facts.written |= std::uint64_t{1} << i;
        } else {
            facts.opaque = true;
        }
        facts.resizes = facts.resizes || argument.kwarg_only();
        const bool list = argument.type()->kind() == c10::TypeKind::ListType;
        // An operator that writes a list of tensors may have written some of them when it fails. So
        // it cannot be called again.
        facts.retryable_after_oom = facts.retryable_after_oom && !list;
        first = false;
    }
    facts.writes = !first;
    // A collective writes its first argument although its schema does not say so.
    if (facts.has(Traits::COLLECTIVE)) {
        facts.written = 1;
        facts.writes = true;
    }
    facts.unseen = facts.name.starts_with("c10d::") && facts.name.ends_with('_') && !facts.writes &&
                   !facts.has(Traits::HARMLESS);
}

// Set `rng_state_args` if the operator draws random numbers from a state that is an argument.
void read_own_state(Facts& facts, const c10::FunctionSchema& schema) {
    bool own = false;
    for (std::uint32_t i = 0; i < facts.arguments && i < 64; ++i) {
        const std::string& name = schema.arguments()[i].name();
        own = own || name == "dropout_state";
        if (name == "dropout" || name == "train" || name == "dropout_state") {
            facts.rng_state_args |= std::uint64_t{1} << i;
        }
        facts.device = name == "device" ? static_cast<int>(i) : facts.device;
    }
    facts.rng_state_args = own ? facts.rng_state_args : 0;
}

void read_returns(Facts& facts, const c10::FunctionSchema& schema) {
    std::size_t aliased = 0;
    facts.returns_written = true;
    for (const c10::Argument& result : schema.returns()) {
        const c10::AliasInfo* alias = result.alias_info();
        aliased += alias != nullptr ? 1 : 0;
        facts.returns_tensors =
            facts.returns_tensors || result.type()->str().find("Tensor") != std::string::npos;
        facts.returns_written = facts.returns_written && alias != nullptr && alias->isWrite();
    }
    const bool only_aliases = aliased != 0 && aliased == schema.returns().size();
    facts.view = only_aliases && !facts.writes && !facts.moves && !facts.composed;
}

// Return true if the operator works on the tensors of its first argument, a list, one by one, and
// returns nothing or a list with one tensor for each.
bool is_on_lists(const Facts& facts, const c10::FunctionSchema& schema) {
    const bool named = facts.name.starts_with("aten::_foreach_") ||
                       facts.name.starts_with("aten::_fused_") ||
                       facts.name == "aten::_amp_foreach_non_finite_check_and_unscale_";
    const auto is_list = [](const c10::Argument& each) { return each.type()->str() == "Tensor[]"; };
    return named && facts.arguments != 0 && is_list(schema.arguments()[0]) &&
           (facts.returns == 0 || (facts.returns == 1 && is_list(schema.returns()[0])));
}

// Set `in_place` and `twin` if the operator's result may be written over its first argument.
void read_in_place(Facts& facts, const c10::OperatorHandle& op) {
    for (const auto& entry : tables().in_place) {
        if (entry->name == facts.name && entry->overload == op.operator_name().overload_name) {
            facts.twin = c10::Dispatcher::singleton().findSchema({entry->name, entry->twin});
            facts.in_place = facts.twin ? entry.get() : nullptr;
        }
    }
    for (std::uint32_t i = 0; i < facts.arguments; ++i) {
        facts.dtype =
            op.schema().arguments()[i].name() == "input_dtype" ? static_cast<int>(i) : facts.dtype;
    }
}

// Return true if the operator's name contains one of `parts`. Also return true for operators
// outside the namespace "aten", because nothing is known about them.
bool is_one_of(const std::vector<std::string>& parts, std::string_view name) {
    if (!name.starts_with("aten::")) {
        return true;
    }
    name.remove_prefix(std::string_view("aten::").size());
    return std::ranges::any_of(parts, [&](const std::string& part) {
        return name.find(part) != std::string_view::npos;
    });
}

// Return which products the operator sums. The names of PyTorch's products of matrices end in "mm".
Products products_of(std::string_view name) {
    if (!is_one_of(tables().products, name)) {
        return Products::none;
    }
    return name.starts_with("aten::") && name.ends_with("mm") ? Products::matrix : Products::any;
}

// Derive the properties of an operator from its schema, its tags, its kernels and the tables.
Facts& learn(const c10::OperatorHandle& op) {
    const c10::FunctionSchema& schema = op.schema();
    Facts& facts = tables().facts.make();
    facts.name = schema.name();
    facts.is_aten = facts.name.starts_with("aten::");
    facts.arguments = static_cast<std::uint32_t>(schema.arguments().size());
    facts.returns = static_cast<std::uint32_t>(schema.returns().size());
    facts.traits = traits_of(facts.name);
    // If an operator has both a composite kernel and one for the CPU, PyTorch runs the latter (for
    // example `silu_backward`). So the operator is not composed of others.
    facts.composed = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                     !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
    facts.copies = facts.name == "aten::copy_";
    facts.moves = facts.name.starts_with("aten::set_");
    facts.resizes = facts.moves || facts.name.starts_with("aten::resize");
    read_arguments(facts, schema);
    read_own_state(facts, schema);
    read_returns(facts, schema);
    read_in_place(facts, op);
    facts.marks = facts.name.starts_with("profiler::");
    facts.ends = facts.marks && facts.name.find("enter") == std::string::npos;
    // Treat `record_stream` like a view. It needs no effect, because the runtime itself keeps a
    // value until all streams that read it have done so.
    facts.view = facts.view || facts.marks || facts.name == "aten::record_stream";
    facts.on_lists = is_on_lists(facts, schema);
    facts.region = facts.name.starts_with("rekindle_regions");
    facts.unit = facts.name.starts_with("rekindle_units");
    facts.talks = has_effects(facts.name);
    if (!facts.region && !facts.talks && !is_in(tables().own, facts.name)) {
        facts.traits.flags |= Traits::TRIED;
    }
    // The body of an operator that is tried may draw random numbers although no tag says so.
    facts.random =
        op.hasTag(at::Tag::nondeterministic_seeded) || facts.has(Traits::RANDOM | Traits::TRIED);
    facts.dynamic = op.hasTag(at::Tag::dynamic_output_shape);
    facts.content = facts.has(Traits::ZEROS) ? ZEROED : 0;
    facts.content = facts.has(Traits::EMPTY) ? UNWRITTEN : facts.content;
    facts.writes = facts.writes || facts.has(Traits::STATISTICS);
    facts.products = products_of(facts.name);
    facts.may_use_workspace = is_one_of(tables().may_use_workspace, facts.name);
    facts.retryable_after_oom = facts.retryable_after_oom && !facts.talks && !facts.unit;
    facts.opaque = facts.opaque || facts.talks || facts.resizes || facts.has(Traits::OPAQUE);
    facts.differentiated = !facts.is_aten && !facts.talks && !facts.writes &&
                           (op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) ||
                            op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU) ||
                            op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCUDA));
    constexpr std::uint32_t more = Traits::COUNTED_FIRST | Traits::CONJUGATING | Traits::QUERY |
                                   Traits::STATISTICS | Traits::COLLECTIVE;
    const bool in_place = facts.writes && facts.written == 1 && facts.returns_written;
    facts.simple = facts.is_aten && (facts.writes ? in_place : facts.returns_tensors) &&
                   !facts.random && !facts.opaque && facts.rng_state_args == 0 && !facts.has(more);
    return facts;
}

}  // namespace

void learn_traits(std::string name, const Traits& traits) {
    tables().traits.emplace_back(std::move(name), traits);
}

void learn_effects(std::string name_space) {
    tables().effects.push_back(std::move(name_space));
}

void learn_own(std::string name_space) {
    tables().own.push_back(std::move(name_space));
}

bool has_effects(std::string_view name) {
    return is_in(tables().effects, name);
}

void learn_products(std::string part) {
    tables().products.push_back(std::move(part));
}

void learn_workspace_operators(std::string part) {
    tables().may_use_workspace.push_back(std::move(part));
}

void learn_in_place(InPlace entry) {
    tables().in_place.push_back(std::make_unique<const InPlace>(std::move(entry)));
}

void watch_removed_operators() {
    const auto& kept = leaky_singleton<c10::RegistrationHandleRAII>(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>())
    );
    static_cast<void>(kept);
}

namespace {

// Forget the properties of removed operators, because the schema of a new operator may be at the
// same address.
void forget_removed() {
    if (removed().load(std::memory_order_relaxed) == nullptr) [[likely]] {
        return;
    }
    std::unique_ptr<Removed> first(removed().exchange(nullptr, std::memory_order_acquire));
    while (first) {
        if (Facts** found = tables().known.find(first->schema)) {
            // Keep `*found` alive, because recipes may still refer to it.
            (*found)->removed = true;
            tables().known.take(first->schema);
        }
        first.reset(first->next);
    }
}

}  // namespace

bool was_removed(const Facts& facts) {
    forget_removed();
    return facts.removed;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
    forget_removed();
    const c10::FunctionSchema& schema = op.schema();
    Facts** found = tables().known.find(&schema);
    if (found != nullptr) {
        return **found;
    }
    Facts& facts = learn(op);
    tables().known.put(&schema, &facts);
    return facts;
}

}  // namespace rekindle
