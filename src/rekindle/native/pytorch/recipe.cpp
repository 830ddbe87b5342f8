#include "recipe.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "versions.h"

namespace rekindle {

namespace {

// All that comes before the key, autograd and what is above it.
c10::DispatchKeySet excluded() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
           c10::DispatchKeySet(KEY) | c10::DispatchKeySet(c10::DispatchKey::Python) |
           c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot) |
           c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerBackMode) |
           c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) |
           c10::DispatchKeySet(c10::DispatchKey::FuncTorchVmapMode) |
           c10::DispatchKeySet(c10::DispatchKey::VmapMode) |
           c10::DispatchKeySet(c10::DispatchKey::Functionalize) |
           c10::DispatchKeySet(c10::DispatchKey::Tracer) |
           c10::DispatchKeySet(c10::DispatchKey::PreDispatch) |
           c10::DispatchKeySet(c10::DispatchKey::PythonDispatcher);
}

// The memory of a resident input, after making sure that it still is what it was.
Home input_home(Record& record) {
    Home home = record.at();
    TORCH_CHECK(home, "a value that should be in memory is not; please report this");
    const auto nbytes = static_cast<Bytes>(home->nbytes());
    if (nbytes != record.nbytes) {
        throw ResizedInput{nbytes, record.nbytes};
    }
    if (record.foreign && record.foreign->checksum &&
        *record.foreign->checksum != checksum_of(*home)) {
        throw ForeignInput{record.site()};
    }
    if (record.version.moved() && record.origin_is_at(home)) {
        throw ModifiedInput{record.site(), record.version.now(), record.version.expected};
    }
    return home;
}

// In the place of running statistics: nothing where that is allowed, else a scratch tensor.
at::Tensor stand_in(const Recipe& recipe, const Geometry& geometry) {
    if (recipe.facts->written == 0) {
        return {};
    }
    at::Tensor made(
        at::detail::empty_strided_cpu(
            geometry.sizes, geometry.strides, c10::typeMetaToScalarType(geometry.dtype)
        )
    );
    std::memset(made.mutable_data_ptr(), 0, made.storage().nbytes());
    return made;
}

bool is_in(std::span<const std::uint32_t> positions, std::uint32_t position) noexcept {
    return std::find(positions.begin(), positions.end(), position) != positions.end();
}

// The homes of all tensor arguments; null for what is left out.
c10::SmallVector<Home, 4> homes_of(Recipe& recipe) {
    c10::SmallVector<Home, 4> homes;
    const auto inputs = recipe.inputs();
    std::size_t next = 0;
    for (std::uint32_t i = 0; i < recipe.signature->geometries.size(); ++i) {
        const bool dropped = recipe.statistics() && is_in(recipe.written(), i);
        homes.push_back(dropped ? Home() : input_home(record_of(*inputs[next++].value->storage)));
    }
    return homes;
}

void make_private(Recipe& recipe, c10::SmallVector<Home, 4>& homes) {
    for (const std::uint32_t position : recipe.written()) {
        const Home shared = homes[position];
        if (shared.get() != record_of(*recipe.inputs()[position].value->storage).at().get()) {
            continue;  // a copy already
        }
        const Home made = copy_of(shared);
        for (Home& each : homes) {
            if (each.get() == shared.get()) {
                each = made;
            }
        }
    }
}

// Puts the generator back afterwards, whatever happens.
class Drawing final {
public:
    explicit Drawing(const Position* random) {
        if (random != nullptr) {
            now_.emplace(random->generator());
            random->restore();
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
    std::optional<Random> now_;
};

c10::SmallVector<Home, 2> fresh_of(const Recipe& recipe, const torch::jit::Stack& stack) {
    c10::SmallVector<Home, 2> made;
    const std::vector<std::uint32_t>& fresh = *recipe.signature->fresh;
    each_tensor(stack, [&](std::uint32_t position, const at::Tensor& tensor) {
        if (is_in(fresh, position)) {
            made.push_back(Home::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
        }
    });
    std::size_t next = 0;
    for (const Value* value : recipe.outputs()) {
        const auto nbytes = next < made.size() ? static_cast<Bytes>(made[next]->nbytes()) : -1;
        if (nbytes != value->storage->nbytes) {
            throw ChangedSize{recipe.facts, nbytes, value->storage->nbytes};
        }
        ++next;
    }
    return made;
}

}  // namespace

AsTheFirstTime::AsTheFirstTime(bool grad_mode)
    : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), excluded()),
      before_(c10::AutogradState::get_tls_state()) {
    c10::AutogradState now = before_;
    now.set_grad_mode(grad_mode);
    now.set_inference_mode(false);
    c10::AutogradState::set_tls_state(std::move(now));
}

AsTheFirstTime::~AsTheFirstTime() {
    c10::AutogradState::set_tls_state(before_);
}

// -- switches (twin of rekindle.pytorch.operators._switches) --------------------------------------

namespace {

constexpr std::array PRECISE{
    std::pair(at::Float32Backend::GENERIC, at::Float32Op::ALL),
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::ALL),
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL),
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::CONV),
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::RNN),
};

bool flushes_denormal() noexcept {
    const volatile double least = 5e-324;
    const volatile double one = 1.0;
    return least * one == 0.0;
}

void set_switches(std::int64_t word) {
    at::Context& context = at::globalContext();
    const auto bit = [&](int position) { return (word >> position & 1) != 0; };
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(word & 0xFF)));
    context.setUserEnabledMkldnn(bit(8));
    context.setDeterministicAlgorithms(bit(9), bit(10));
    context.setDeterministicMkldnn(bit(11));
    context.setUserEnabledNNPACK(bit(12));
    context.setAllowFP16ReductionCPU(bit(13));
    at::Context::setFlushDenormal(bit(14));
    at::set_num_threads(static_cast<int>(word >> 16 & 0xFFFF));
}

void set_precision(std::int64_t word) {
    for (const auto& [backend, op] : PRECISE) {
        at::globalContext().setFloat32Precision(
            backend, op, static_cast<at::Float32Precision>(word & 7)
        );
        word >>= 3;
    }
}

}  // namespace

std::int64_t switches() {
    at::Context& context = at::globalContext();
    std::int64_t word = static_cast<std::int64_t>(c10::get_default_dtype_as_scalartype()) & 0xFF;
    word |= static_cast<std::int64_t>(context.userEnabledMkldnn()) << 8;
    word |= static_cast<std::int64_t>(context.deterministicAlgorithms()) << 9;
    word |= static_cast<std::int64_t>(context.deterministicAlgorithmsWarnOnly()) << 10;
    word |= static_cast<std::int64_t>(context.deterministicMkldnn()) << 11;
    word |= static_cast<std::int64_t>(context.userEnabledNNPACK()) << 12;
    word |= static_cast<std::int64_t>(context.allowFP16ReductionCPU()) << 13;
    word |= static_cast<std::int64_t>(flushes_denormal()) << 14;
    word |= static_cast<std::int64_t>(at::get_num_threads() & 0xFFFF) << 16;
    return word;
}

std::int64_t precision() {
    std::int64_t word = std::int64_t{1} << 62;  // so that it is not 0
    int shift = 0;
    for (const auto& [backend, op] : PRECISE) {
        const auto found = at::globalContext().float32Precision(backend, op);
        word |= static_cast<std::int64_t>(found) << shift;
        shift += 3;
    }
    return word;
}

Switched::Switched(std::int64_t switches_then, std::int64_t precision_then)
    : now_(switches()),
      then_(switches_then),
      precision_now_(precision_then == 0 ? 0 : precision()),
      precision_then_(precision_then) {
    if (now_ != then_) {
        set_switches(then_);
    }
    if (precision_now_ != precision_then_) {
        set_precision(precision_then_);
    }
}

Switched::~Switched() {
    if (now_ != then_) {
        set_switches(now_);
    }
    if (precision_now_ != precision_then_) {
        set_precision(precision_now_);
    }
}

c10::SmallVector<Home, 2> run_again(Recipe& recipe, bool in_place) {
    c10::SmallVector<Home, 4> homes = homes_of(recipe);
    const bool writes = !recipe.written().empty() && !recipe.statistics();
    if (writes && !in_place) {
        make_private(recipe, homes);
    }
    std::vector<at::Tensor> tensors;
    tensors.reserve(homes.size());
    for (std::size_t i = 0; i < homes.size(); ++i) {
        const Geometry& geometry = recipe.signature->geometries[i];
        tensors.push_back(homes[i] ? geometry.in(homes[i]) : stand_in(recipe, geometry));
    }
    torch::jit::Stack stack;
    recipe.signature->arguments(stack, tensors, recipe.extras());
    {
        const AsTheFirstTime guard(recipe.grad_mode);
        const Drawing drawing(recipe.random());
        const Switched switched(recipe.signature->key[1], recipe.signature->key[2]);
        recipe.signature->op.callBoxed(stack);
    }
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
