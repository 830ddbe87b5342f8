// Runs every operator: shapes come from the Meta kernel at once, values later from the CPU kernel in
// the stream.
#pragma once

#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "guard.h"

namespace standin {

using c10::IValue;

inline void wrap(const Tensor& r, const Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
}
inline Tensor as_cpu(const Tensor& t) {  // a CPU view of the same bytes, without ownership
  const auto& s = t.storage();
  c10::Storage raw(c10::Storage::use_byte_size_t(), s.nbytes(), DataPtr(s.mutable_data(), Device(c10::DeviceType::CPU)), nullptr, false);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(raw), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  wrap(r, t);
  return r;
}
inline Tensor as_meta(const Tensor& t) {
  Tensor r = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  wrap(r, t);
  return r;
}
inline Tensor copied(const Tensor& t) {  // a copy of a CPU argument, taken at the launch
  auto r = t.clone();
  wrap(r, t);
  return r;
}
inline bool here(const Tensor& t) { return t.defined() && t.device().type() == DEVICE_TYPE; }
template <class F> IValue mapped(const IValue& v, F f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> r;
    for (const Tensor& t : v.toTensorVector()) r.push_back(t.defined() ? f(t) : t);
    return r;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> r;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      r.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return r;
  }
  return v;
}
template <class F> void visit(const IValue& v, F f) { mapped(v, [&](const Tensor& t) { f(t); return t; }); }

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard g(device);
  return Tensor(at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(DEVICE_KEY), dtype.value_or(c10::get_default_dtype_as_scalartype())));
}
inline Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard g(device);
  return Tensor(at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(DEVICE_KEY), dtype.value_or(c10::get_default_dtype_as_scalartype()), format));
}
inline Tensor like(const Tensor& meta, Device d) {
  return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), std::nullopt, d, std::nullopt);
}
inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t need = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < need) resize_bytes(self.storage().unsafeGetStorageImpl(), need);
  return self;
}

using Ops = std::vector<IValue>;
// Sums by atomics differ each time that the same is added up, as if their threads ran in another
// order.
inline std::atomic<bool> differing{false};  // else sums are as on the CPU
inline std::map<size_t, int64_t> summed;    // how often, by what was added up; under names_mutex
inline bool by_atomics(const std::string& name) {
  static const std::set<std::string> names{"aten::index_add", "aten::index_add_", "aten::scatter_add", "aten::scatter_add_", "aten::cumsum"};
  return differing && names.count(name);
}
inline double nudge_of(const std::string& name, const Ops& values) {
  std::string all = name;
  for (auto& v : values) visit(v, [&](const Tensor& t) {
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor row = t.contiguous();
    all.append(static_cast<const char*>(row.const_data_ptr()), row.nbytes());
  });
  Lock l(names_mutex);
  return 1 + 1e-3 * (summed[std::hash<std::string>{}(all)]++ % 16);
}
inline void on_cpu(const c10::OperatorHandle& op, Ops& values) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
}

// What a kernel takes by the virtual clock, in us.
inline double us_of(const std::string& name, const Ops& args, const Ops& results) {
  if (bytes_per_us == 0) return 0;
  double bytes = 0, flops = 0;
  for (auto* all : {&args, &results}) for (auto& v : *all) visit(v, [&](const Tensor& t) { bytes += here(t) ? t.nbytes() : 0; });
  static const std::map<std::string, size_t> products{{"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}};
  if (auto p = products.find(name); p != products.end()) flops = 2. * results[0].toTensor().numel() * args[p->second].toTensor().size(-1);
  return 3 + std::max(bytes / bytes_per_us, flops / flops_per_us);
}

inline void fallback(const c10::OperatorHandle& called, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = called.schema();
  Ops args(stack->end() - schema.arguments().size(), stack->end());
  std::string name = schema.name();
  const auto& op = called;
  auto given = args;  // arguments of the CPU kernel; `args` keeps the caller's
  Device device(DEVICE_TYPE, this_device);
  bool found = false;
  for (auto& a : args) visit(a, [&](const Tensor& t) { if (here(t) && !found) { device = t.device(); found = true; } });
  for (auto& a : args) if (!found && a.isDevice() && a.toDevice().type() == DEVICE_TYPE) device = Device(DEVICE_TYPE, index_of(a.toDevice()));
  c10::DeviceGuard guard(device);
  auto* q = now_on(device.index());
  const auto& formal = op.schema().arguments();
  for (size_t i = 0; i < given.size(); i++) {
    if (given[i].isDevice()) given[i] = Device(c10::DeviceType::CPU);
    if (formal[i].type()->str().find("Generator") != std::string::npos) {
      given[i] = drawn(given[i].isNone() ? std::nullopt : std::optional(given[i].toGenerator()), device.index());
    }
  }
  // the results without their values
  bool known = true;
  Ops metas, before;
  const auto& returns = schema.returns();
  for (auto& r : returns)
    if (r.type()->kind() != c10::TypeKind::TensorType && !r.type()->isSubtypeOf(c10::ListType::ofTensors())) known = false;
  if (known) {
    for (auto& v : given) {
      metas.push_back(v.isGenerator() ? IValue() : v.isDevice() ? IValue(Device(c10::DeviceType::Meta)) : mapped(v, [](const Tensor& t) { return here(t) ? as_meta(t) : t; }));
    }
    before = metas;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
    } catch (const std::exception&) { known = false; }
  }
  if (known)  // resize out= arguments as the operator would
    for (size_t i = 0; i < before.size(); i++)
      if (given[i].isTensor() && formal[i].alias_info() && formal[i].alias_info()->isWrite() && here(given[i].toTensor())) {
        auto& t = given[i].toTensor(); auto& w = before[i].toTensor();
        if (t.sizes() != w.sizes()) { resize_(t, w.sizes(), std::nullopt); t.unsafeGetTensorImpl()->set_sizes_and_strides(w.sizes(), w.strides()); }
      }
  std::map<c10::TensorImpl*, Tensor> same;
  Ops values;
  for (auto& v : given)
    values.push_back(mapped(v, [&](const Tensor& t) {
      auto& x = same[t.unsafeGetTensorImpl()];
      if (!x.defined()) x = here(t) ? as_cpu(t) : known ? copied(t) : t;
      return x;
    }));
  // the returned tensors: an argument itself, or new memory
  auto written = [&](const c10::Argument& r) -> const IValue* {
    if (!r.alias_info() || !r.alias_info()->isWrite()) return nullptr;
    for (size_t i = 0; i < args.size(); i++) {
      auto* a = schema.arguments()[i].alias_info();
      if (a && a->isWrite() && a->beforeSets() == r.alias_info()->beforeSets()) return &args[i];
    }
    return nullptr;
  };
  Ops results;
  if (known) {
    queued++;
    std::vector<IValue> outs(returns.size());
    for (size_t i = 0; i < returns.size(); i++) {
      if (auto* a = written(returns[i])) { results.push_back(*a); continue; }
      TORCH_CHECK(!returns[i].alias_info(), name, " is a view without a kernel on the stand-in device");
      results.push_back(mapped(metas[i], [&](const Tensor& t) { return like(t, device); }));
      outs[i] = mapped(results[i], [](const Tensor& t) { return as_cpu(t); });
    }
    bool differs = by_atomics(name);
    double us = us_of(name, args, results);
    q->push([op, q, us, values = std::move(values), outs = std::move(outs), name, differs]() mutable {
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us.load()));
      q->us = q->us + us;
      double nudge = differs ? nudge_of(name, values) : 1;
      on_cpu(op, values);
      if (nudge != 1) for (auto& v : values) visit(v, [&](const Tensor& t) {
        at::AutoDispatchBelowADInplaceOrView below;
        if (t.is_floating_point()) Tensor(t).mul_(nudge);
      });
      for (size_t i = 0; i < outs.size(); i++) {
        std::vector<Tensor> to, from;
        visit(outs[i], [&](const Tensor& t) { to.push_back(t); });
        if (!to.empty()) visit(values[i], [&](const Tensor& t) { from.push_back(t); });
        TORCH_CHECK(to.size() == from.size(), name, ": not as many results as foretold");
        for (size_t j = 0; j < to.size(); j++) {
          TORCH_CHECK(to[j].sizes() == from[j].sizes() && to[j].dtype() == from[j].dtype(), name, ": another result than foretold");
          if (to[j].strides() != from[j].strides()) strides_differ++;
          at::AutoDispatchBelowADInplaceOrView below;
          to[j].copy_(from[j]);
        }
      }
    });
  } else {  // sizes depend on values: synchronize, as a device does
    at_once++;
    { Lock l(names_mutex); at_once_names[name]++; }
    q->drain();
    raise_errors();
    on_cpu(op, values);
    for (size_t i = 0; i < returns.size(); i++) {
      if (auto* a = written(returns[i])) { results.push_back(*a); continue; }
      TORCH_CHECK(!returns[i].alias_info(), name, " is a view without a kernel on the stand-in device");
      results.push_back(mapped(values[i], [&](const Tensor& t) {
        auto r = like(t, device);
        as_cpu(r).copy_(t);  // the stream is idle
        return r;
      }));
    }
  }
  torch::jit::drop(*stack, args.size());
  for (auto& r : results) stack->push_back(std::move(r));
}

inline Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto device = here(dst) ? dst.device() : self.device();
  c10::DeviceGuard g(device);
  auto* q = now_on(device.index());
  if (here(self) && here(dst) && self.device() != dst.device()) now_on(self.device().index())->drain();
  bool pin = !here(self) ? pinned().holds(self.storage().data()) : !here(dst) && pinned().holds(dst.storage().data());
  bool later = non_blocking && pin;
  Tensor from = here(self) ? as_cpu(self) : later ? as_cpu(self) : self.clone();
  Tensor to = as_cpu(dst);
  double us = bytes_per_us == 0 ? 0 : here(self) && here(dst) ? 2 * self.nbytes() / bytes_per_us : self.nbytes() / copied_bytes_per_us;
  q->push([from, to, q, us]() mutable {
    q->us = q->us + us;
    if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us.load()));
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  if (later) pinned().used(here(self) ? dst.storage().data() : self.storage().data(), mark_on(q));
  else if (!here(dst) || (pin && !non_blocking)) { q->drain(); raise_errors(); }
  return dst;
}
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p == 1 ? 0. : 1. / (1 - p)), mask};
}
inline at::Scalar item(const Tensor& t) {
  now_on(t.device().index())->drain();
  raise_errors();
  return at::_local_scalar_dense(as_cpu(t));
}
inline Tensor& set_storage(Tensor& self, c10::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(s));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  else self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

}  // namespace standin
