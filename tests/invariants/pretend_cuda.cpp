// Tells a PyTorch without CUDA that there is a CUDA device with one stream, so that autograd and
// autocast take tensors that say they are on it. No operation runs there: see pretend_cuda.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device device{c10::DeviceType::CUDA, 0};
const c10::Stream stream{c10::Stream::DEFAULT, device};

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::Device exchangeDevice(c10::Device) const override { return device; }
    c10::Device getDevice() const override { return device; }
    c10::Stream getStream(c10::Device) const noexcept override { return stream; }
    c10::Stream getDefaultStream(c10::Device) const override { return stream; }
    c10::Stream getNewStream(c10::Device, int) const override { return stream; }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeDevice(const c10::DeviceIndex) const override {}
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    bool isPinnedPtr(const void*) const override { return false; }
    Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(0); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
