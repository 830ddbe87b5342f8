#include "recipe.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "../torch/as_the_first_time.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/homes.h"
#include "../torch/switches.h"

namespace rekindle {

namespace {

// Return the memory of a resident input. Throws if its contents are not those of the first run.
Home input_home(Record& record) {
    Home home = record.at();
    if (!home) {
        throw Died();
    }
    const auto nbytes = static_cast<Bytes>(home->nbytes());
    if (nbytes != record.size) {
        throw ResizedInput(nbytes, record.size);
    }
    if (record.foreign && record.foreign->checksum &&
        *record.foreign->checksum != checksum_of(*home)) {
        throw ForeignInput(record.site());
    }
    if (record.version.moved() && !record.strays && record.origin_is_at(home)) {
        throw ModifiedInput(record.site(), record.version.now(), record.version.expected);
    }
    return home;
}

// Return a replacement for running statistics: an undefined tensor if the operator allows that,
// else a scratch tensor.
at::Tensor stand_in(const Recipe& recipe, const Geometry& geometry) {
    if (recipe.facts->written == 0) {
        return {};
    }
    const AsTheFirstTime guard(false);
    const auto options = at::TensorOptions().dtype(geometry.dtype).device(geometry.device);
    return at::empty_strided(geometry.sizes, geometry.strides, options).zero_();
}

bool is_in(std::span<const std::uint32_t> positions, std::uint32_t position) noexcept {
    return std::ranges::find(positions, position) != positions.end();
}

// Return the storages of all tensor arguments, null for those that are left out.
c10::SmallVector<Home, 4> homes_of(const Recipe& recipe) {
    c10::SmallVector<Home, 4> homes;
    const auto inputs = recipe.inputs();
    std::size_t next = 0;
    for (std::uint32_t i = 0; i < recipe.signature->geometries.size(); ++i) {
        const bool dropped = recipe.statistics() && is_in(recipe.written(), i);
        homes.push_back(dropped ? Home() : input_home(record_of(*inputs[next++].value->storage)));
    }
    return homes;
}

// Replace the storages that the kernel writes by copies, if they are shared with a resident value.
void make_private(const Recipe& recipe, c10::SmallVector<Home, 4>& homes) {
    for (const std::uint32_t position : recipe.written()) {
        const Home shared = homes[position];
        if (shared.get() != record_of(*recipe.inputs()[position].value->storage).at().get()) {
            continue;  // copied already
        }
        const Home made = copy_of(shared);
        for (Home& each : homes) {
            if (each.get() == shared.get()) {
                each = made;
            }
        }
    }
}

// Scope in which the generators stand where they stood on the first run (R5). The destructor
// restores them.
class Drawing final {
public:
    explicit Drawing(std::span<const std::unique_ptr<Position>> random) {
        for (const std::unique_ptr<Position>& each : random) {
            if (const Drawn* there = each->on_device()) {
                on_devices_.push_back(std::make_unique<DrawingFrom>(each->generator(), *there));
            } else {
                now_.emplace(each->generator());
                each->restore();
            }
        }
    }

    Drawing(const Drawing&) = delete;
    Drawing& operator=(const Drawing&) = delete;
    Drawing(Drawing&&) = delete;
    Drawing& operator=(Drawing&&) = delete;

    ~Drawing() {
        if (now_) {
            now_->restore();
        }
    }

private:
    std::optional<Random> now_;  // state of the CPU's generator
    c10::SmallVector<std::unique_ptr<DrawingFrom>, 1> on_devices_;
};

// Return the memory of the outputs. Throws if their sizes differ from those of the first run.
c10::SmallVector<Home, 2> fresh_of(const Recipe& recipe, const torch::jit::Stack& stack) {
    c10::SmallVector<Home, 2> made;
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): it has run before
    const std::vector<std::uint32_t>& fresh = *recipe.signature->fresh;
    each_tensor(stack, [&](std::uint32_t position, const at::Tensor& tensor) {
        if (is_in(fresh, position)) {
            made.push_back(Home::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
        }
    });
    std::size_t next = 0;
    for (const Value* value : recipe.outputs()) {
        const auto nbytes = next < made.size() ? static_cast<Bytes>(made[next]->nbytes()) : -1;
        const Bytes before = record_of(*value->storage).size;
        if (nbytes != before) {
            throw ChangedSize(recipe.facts, nbytes, before);
        }
        ++next;
    }
    return made;
}

}  // namespace

torch::jit::Stack call_again(
    Signature& signature,
    std::span<at::Tensor> tensors,
    std::span<const c10::IValue> extras,
    std::span<const std::unique_ptr<Position>> random,
    bool grad_mode,
    c10::function_ref<void(c10::function_ref<void()>)> calling
) {
    torch::jit::Stack stack;
    signature.arguments(stack, tensors, extras);
    if (signature.takes_over) {
        stack.push_back(stack.front());
    }
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): there if it takes over
    const c10::OperatorHandle& op = signature.takes_over ? *signature.facts.twin : signature.op;
    const AsTheFirstTime guard(grad_mode);
    const Drawing drawing(random);
    const Switched switched(signature.key[1], signature.key[2]);
    calling([&] { op.callBoxed(stack); });
    return stack;
}

c10::SmallVector<Home, 2> run_again(const Recipe& recipe, bool in_place, Calling calling) {
    c10::SmallVector<Home, 4> homes = homes_of(recipe);
    const bool writes = !recipe.written().empty() && !recipe.statistics();  // in place (R3)
    if (writes && !in_place) {
        make_private(recipe, homes);
    }
    std::vector<at::Tensor> tensors;
    tensors.reserve(homes.size());
    for (std::size_t i = 0; i < homes.size(); ++i) {
        const Geometry& geometry = recipe.signature->geometries[i];
        tensors.push_back(homes[i] ? geometry.in(homes[i]) : stand_in(recipe, geometry));
    }
    const torch::jit::Stack stack = call_again(
        *recipe.signature,
        tensors,
        recipe.extras(),
        recipe.random(),
        recipe.grad_mode,
        [&](Kernel kernel) { calling(homes, kernel); }
    );
    if (!writes) {
        return fresh_of(recipe, stack);
    }
    c10::SmallVector<Home, 2> made;
    for (const std::uint32_t position : recipe.written()) {
        made.push_back(homes[position]);
    }
    return made;
}

}  // namespace rekindle
