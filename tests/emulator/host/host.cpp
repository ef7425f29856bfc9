// The process that runs CUDA kernels compiled for the CPU. It reads commands from standard input.
//
// Every CUDA thread is a fiber with its own stack. The threads of a CTA run round-robin on one OS thread, each until it
// waits in a collective. CTAs run one after the other, or all together in a cooperative launch.
//
// The process reports errors with the file and line of the kernel: divergent barriers, collectives that miss a lane,
// writes past a shared array; with -fsanitize=address,undefined also accesses out of bounds and undefined arithmetic.
#include "schedule.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

namespace emulator_host {

struct Request {
    uint64_t command, a, b, payload;  // payload: number of bytes that follow
};

int input = 0, output = 1;
std::string kernel_name;

void read_all(void* data, size_t bytes) {
    for (char* to = static_cast<char*>(data); bytes;) {
        ssize_t got = read(input, to, bytes);
        if (got <= 0) _exit(0);
        to += got;
        bytes -= got;
    }
}

__attribute__((no_sanitize("address"))) void write_all(const void* data, size_t bytes) {
    for (const char* from = static_cast<const char*>(data); bytes;) {
        ssize_t put = write(output, from, bytes);
        if (put <= 0) _exit(0);
        from += put;
        bytes -= put;
    }
}

void answer(bool failed, const void* data, size_t bytes) {
    uint64_t head[2] = {failed, bytes};
    write_all(head, sizeof head);
    write_all(data, bytes);
}

// Reports the location of the kernel when a signal ends the process.
void on_signal(int signal) {
    char line[512];
    const Thread* t = emulator_current;
    const char* what = signal == SIGALRM ? "does not end (no time left)" : strsignal(signal);
    int size = snprintf(line, sizeof line, "kernel %s: %s", kernel_name.c_str(), what);
    if (t)
        size += snprintf(line + size, sizeof line - size,
                         " in CTA (%u,%u,%u) thread (%u,%u,%u), last seen in %s at %s:%d\n", t->block_index.x,
                         t->block_index.y, t->block_index.z, t->thread_index.x, t->thread_index.y, t->thread_index.z,
                         t->site.what, t->site.file, t->site.line);
    if (write(2, line, size) < 0) _exit(2);
    _exit(2);
}

void catch_signals() {
    static char stack[64 << 10];
    stack_t alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGALRM, &action, nullptr);
    if (WITH_ASAN) return;  // the sanitizer's report of other signals is better
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(signal, &action, nullptr);
}

// Device memory. Allocations have the exact size, so that the sanitizer detects accesses past the end; without the
// sanitizer, guard bytes follow.
constexpr size_t DEVICE_GUARD = WITH_ASAN ? 0 : 256;
std::map<char*, size_t> allocations;

void allocate(size_t bytes) {
    void* data = nullptr;
    size_t size = bytes + DEVICE_GUARD;
    if (posix_memalign(&data, 256, size ? size : 1)) return answer(true, "out of memory", 13);
    memset(data, POISON, bytes);
    memset(static_cast<char*>(data) + bytes, GUARD, DEVICE_GUARD);
    allocations[static_cast<char*>(data)] = bytes;
    answer(false, &data, sizeof data);
}

void check_device_guards() {
    for (auto& [data, bytes] : allocations)
        for (size_t i = 0; i < DEVICE_GUARD; ++i)
            if (static_cast<unsigned char>(data[bytes + i]) != GUARD && run.error.empty())
                run.error = text("wrote byte %zu of a buffer of %zu bytes", bytes + i, bytes);
}

void load(std::string path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        std::string reason = dlerror();
        return answer(true, reason.data(), reason.size());
    }
    answer(false, &library, sizeof library);
}

void find(void* library, std::string name) {
    const Entry* entry = static_cast<const Entry*>(dlsym(library, name.c_str()));
    if (!entry) return answer(true, name.data(), name.size());
    std::vector<uint64_t> reply = {reinterpret_cast<uint64_t>(entry), entry->count};
    for (unsigned i = 0; i < entry->count; ++i) reply.insert(reply.end(), {entry->sizes[i], uint64_t(entry->kinds[i])});
    answer(false, reply.data(), reply.size() * 8);
}

// Payload: grid[3], block[3], bytes of dynamic shared memory, cooperative, CTAs per cluster, order, seconds, length of
// the name, name, then each parameter at a multiple of 16 bytes.
void start(const Entry* entry, std::vector<char>& payload) {
    uint64_t head[12];
    memcpy(head, payload.data(), sizeof head);
    run = Run();
    run.entry = *entry;
    run.grid = dim3(head[0], head[1], head[2]);
    run.block = dim3(head[3], head[4], head[5]);
    run.dynamic_bytes = head[6];
    run.cooperative = head[7];
    run.cluster = head[8];
    run.order = head[9];
    kernel_name.assign(payload.data() + sizeof head, head[11]);
    size_t offset = (sizeof head + head[11] + 15) / 16 * 16;
    for (unsigned i = 0; i < entry->count; ++i) {
        run.parameters.push_back(payload.data() + offset);
        offset += (entry->sizes[i] + 15) / 16 * 16;
    }
    alarm(head[10]);
    launch();
    alarm(0);
    if (run.error.empty()) check_device_guards();
    answer(!run.error.empty(), run.error.data(), run.error.size());
}

void obey(const Request& request, std::vector<char>& payload) {
    char* address = reinterpret_cast<char*>(request.a);
    std::string name(payload.data(), payload.size());
    switch (request.command) {
        case 'A':
            return allocate(request.a);
        case 'F':
            allocations.erase(address);
            free(address);
            return answer(false, nullptr, 0);
        case 'W':
            memcpy(address, payload.data(), payload.size());
            return answer(false, nullptr, 0);
        case 'R':
            return answer(false, address, request.b);
        case 'S':
            memset(address, request.b >> 56, request.b & ((uint64_t(1) << 56) - 1));
            return answer(false, nullptr, 0);
        case 'L':
            return load(name);
        case 'N':
            return find(address, name);
        case 'K':
            return start(reinterpret_cast<const Entry*>(address), payload);
        default:
            return answer(true, "unknown command", 15);
    }
}

}  // namespace emulator_host

int main() {
    input = dup(0);
    output = dup(1);
    dup2(2, 1);  // sends the kernels' printf to stderr
    catch_signals();
    for (;;) {
        Request request;
        read_all(&request, sizeof request);
        std::vector<char> payload(request.payload);
        if (request.payload) read_all(payload.data(), request.payload);
        obey(request, payload);
        fflush(stdout);
    }
}
