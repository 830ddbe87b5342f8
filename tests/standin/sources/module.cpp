// Simulates a device `cuda` for tests: it uses host memory and CPU kernels. Its streams may run each
// operator as late as possible, so that a missing wait gives wrong results.
#include <torch/csrc/utils/pybind.h>

#include "operators.h"

namespace standin {

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", [](const Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b, std::optional<int64_t> o) { return at::native::as_strided_tensorimpl(t, a, b, o); });
  m.impl("view", [](const Tensor& t, c10::IntArrayRef a) { return at::native::view(t, a); });
  m.impl("_reshape_alias", [](const Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b) { return at::native::_reshape_alias(t, a, b); });
  m.impl("unfold", [](const Tensor& t, int64_t d, int64_t n, int64_t s) { return at::native::unfold(t, d, n, s); });
  m.impl("view_as_real", [](const Tensor& t) { return at::native::view_as_real(t); });
  m.impl("view_as_complex", [](const Tensor& t) { return at::native::view_as_complex(t); });
  // A composite kernel has precedence over the fallback. If the CPU has a kernel of its own, use
  // that one, since the composite gives other bits.
  static const std::set<std::string> own{"aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::native_dropout",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::record_stream", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"};
  auto& all = c10::Dispatcher::singleton();
  for (auto& name : all.getAllOpNames()) {
    auto op = all.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || own.count(toString(name))) continue;
    bool cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU), view = false;
    bool conv = name.overload_name.empty() && (name.name == "aten::convolution" || name.name == "aten::convolution_backward");
    bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    for (auto& r : op->schema().returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
    if (((cpu && composite) || conv) && !view) { m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>()); overridden++; }
  }
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& self, const Tensor& dst) { dst.resize_(self.sizes()); return copy_from(self, dst, false); });
  m.impl("_local_scalar_dense", item);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", [](const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) -> int64_t { return 0; });
  m.impl("record_stream", [](Tensor& t, Stream s) { memory().recordStream(t.storage().data_ptr(), s); });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", [](Tensor& t, c10::Storage s) -> Tensor& { int64_t n = s.nbytes() / t.itemsize(); return set_storage(t, s, 0, {n}, {}); });
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& s) -> Tensor& { return set_storage(t, s.storage(), s.storage_offset(), s.sizes(), s.strides()); });
  m.impl("set_", [](Tensor& t) -> Tensor& { return set_storage(t, c10::Storage(c10::Storage::use_byte_size_t(), 0, &memory(), true), 0, {0}, {}); });
  m.impl("copy_", [](Tensor& self, const Tensor& src, bool non_blocking) -> Tensor& { copy_from(src, self, non_blocking); return self; });
}

}  // namespace standin

namespace at {
using standin::CudaHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CudaHooks)
}  // namespace at

using namespace standin;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DEVICE_TYPE, &memory());
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("late", [](bool first, bool others) { default_late = first; others_late = others; for (int d = 0; d < DEVICES; d++) for (auto* q : all_on(d)) q->poke(); }, release());
  m.def("delay_us", [](int64_t us) { delay_us = us; });
  m.def("clock", [](double bytes, double flops, double copied) { bytes_per_us = bytes; flops_per_us = flops; copied_bytes_per_us = copied; });
  m.def("us", [](int d) { drain_device(d); raise_errors(); return queue_of(d, 0)->us.load(); }, release());
  m.def("fail_query", [](int64_t n) { failing_query = n; });
  m.def("poison", [](bool on) { poison = on; });
  m.def("limit", [](int d, size_t bytes) { memory().limit[d] = bytes; });
  m.def("refuse", [](int d, size_t most, int64_t times, const std::string& said) { memory().most[d] = most; memory().refusals = times; memory().refusal = said; });
  m.def("refusals_left", [] { return memory().refusals; });
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("empty_cache", [] { memory().emptyCache(); }, release());
  m.def("atomics", [](bool on) { Lock l(names_mutex); differing = on; summed.clear(); });
  m.def("capture", [](bool on) { capturing = on; });
  m.def("is_capturing", [] { return capturing.load(); });
  m.def("states_set", [] { return states_set.load(); });
  m.def("counts", [] {
    Lock l(names_mutex);
    std::map<std::string, int64_t> r = at_once_names;
    r["overridden"] = overridden; r["queued"] = queued; r["at_once"] = at_once; r["strides_differ"] = strides_differ;
    return r;
  });
  m.def("asked", [] {
    std::map<std::string, int64_t> r;
    auto take = [&](const char* name, std::atomic<int64_t>& n) { r[name] = n.exchange(0); };
    take("stream", asked.stream); take("capturing", asked.capturing); take("event_record", asked.event_record);
    take("event_query", asked.event_query); take("event_wait", asked.event_wait); take("stats", asked.stats);
    take("generator", asked.generator); take("record_stream", asked.record_stream);
    return r;
  });
  m.def("device", [] { return (int)this_device; });
  m.def("set_device", [](int d) { this_device = d; });
  m.def("stream", [](int d) { return current_stream[d]; });
  m.def("new_stream", [](int d) { return Guard().getNewStream(Device(DEVICE_TYPE, d)).id(); });
  m.def("set_stream", [](int d, int64_t id) { current_stream[d] = id; });
  m.def("synchronize", [](int d) { drain_device(d); raise_errors(); }, release());
  m.def("memory_info", [](int d) { return memory().getMemoryInfo(d); });
  m.def("segments", [](int d) { return memory().segments(d); });
  m.def("reset_peak", [](int d) { memory().resetPeakStats(d); });
  m.def("resize", [](const at::Tensor& whole, size_t n) { resize_bytes(whole.storage().unsafeGetStorageImpl(), n); }, release());
  m.def("stats", [](int d) {
    auto s = memory().getDeviceStats(d);
    std::map<std::string, int64_t> r{{"num_alloc_retries", s.num_alloc_retries}, {"num_ooms", s.num_ooms}, {"num_device_alloc", s.num_device_alloc}, {"num_device_free", s.num_device_free}};
    const char* pools[] = {"all", "small_pool", "large_pool"};
    auto put = [&](std::string name, const c10::CachingAllocator::StatArray& x) {
      for (int i = 0; i < 3; i++) {
        auto at = name + "." + pools[i] + ".";
        r[at + "current"] = x[i].current; r[at + "peak"] = x[i].peak; r[at + "allocated"] = x[i].allocated; r[at + "freed"] = x[i].freed;
      }
    };
    put("allocation", s.allocation); put("segment", s.segment); put("active", s.active); put("inactive_split", s.inactive_split);
    put("allocated_bytes", s.allocated_bytes); put("reserved_bytes", s.reserved_bytes); put("active_bytes", s.active_bytes);
    put("inactive_split_bytes", s.inactive_split_bytes); put("requested_bytes", s.requested_bytes);
    return r;
  });
}
