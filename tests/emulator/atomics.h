// CUDA's atomic functions. All CUDA threads run on one OS thread and switch only in collectives, so plain updates are
// atomic.
#pragma once

namespace emulator {
template <typename T, typename Update>
T update(T* address, Update change) {
    T old = *address;
    *address = change(old);
    return old;
}
}  // namespace emulator

template <typename T>
using EmulatorValue = std::common_type_t<T>;  // in a parameter: not deduced, converts as CUDA's overloads do

template <typename T>
T atomicAdd(T* address, EmulatorValue<T> value) {
    if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        return emulator::update(address, [=](T old) { return T(U(old) + U(value)); });
    } else {
        return emulator::update(address, [=](T old) { return T(old + value); });
    }
}
template <typename T>
T atomicSub(T* address, EmulatorValue<T> value) {
    using U = std::make_unsigned_t<T>;
    return emulator::update(address, [=](T old) { return T(U(old) - U(value)); });
}
template <typename T>
T atomicExch(T* address, EmulatorValue<T> value) {
    return emulator::update(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, EmulatorValue<T> expected, EmulatorValue<T> value) {
    return emulator::update(address, [=](T old) { return old == expected ? value : old; });
}
template <typename T>
T atomicMin(T* address, EmulatorValue<T> value) {
    return emulator::update(address, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicMax(T* address, EmulatorValue<T> value) {
    return emulator::update(address, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicAnd(T* address, EmulatorValue<T> value) {
    return emulator::update(address, [=](T old) { return T(old & value); });
}
template <typename T>
T atomicOr(T* address, EmulatorValue<T> value) {
    return emulator::update(address, [=](T old) { return T(old | value); });
}
template <typename T>
T atomicXor(T* address, EmulatorValue<T> value) {
    return emulator::update(address, [=](T old) { return T(old ^ value); });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return emulator::update(address, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
    return emulator::update(address, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
template <typename T>
T atomicAdd_block(T* address, EmulatorValue<T> value) {
    return atomicAdd(address, value);
}
