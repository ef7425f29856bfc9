// A CUDA driver without a GPU, for tests of what happens on the host: memory is the host's, kernels only leave a
// record of their launch. A kernel's name tells its parameters: params_8_4 has one of 8 bytes and one of 4; static4000_8
// has 4000 bytes of static shared memory.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

struct Function {
    std::string name;
    std::vector<size_t> sizes, offsets;
    int fixed = 0;        // bytes of static shared memory
    int max_dynamic = 0;  // bytes that were asked for
    int carveout = -1;  // per cent
};

struct Attribute {  // CUlaunchAttribute
    int id;
    char pad[4];
    unsigned char value[64];
};

struct Configuration {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};

std::map<std::string, int> failures;  // function -> status of its next call
std::map<void*, size_t> blocks;
size_t memory_left = size_t(64) << 20;
std::string record;  // of the last launch
std::vector<std::function<void()>> captured;
bool capturing = false;
int launches = 0, capability = 90;

int status(const char* function) {
    auto found = failures.find(function);
    if (found == failures.end()) return 0;
    int code = found->second;
    failures.erase(found);
    return code;
}

void enqueue(std::function<void()> work) {
    if (capturing)
        captured.push_back(work);
    else
        work();
}

}  // namespace

#define STATUS \
    if (int code = status(__func__)) return code

extern "C" {

// ---- for the tests ----
void fake_fail(const char* function, int code) { failures[function] = code; }
const char* fake_record() { return record.c_str(); }
int fake_launches() { return launches; }
void fake_capability(int value) { capability = value; }
size_t fake_memory_left() { return memory_left; }

// ---- the driver ----
int cuInit(unsigned) {
    STATUS;
    return getenv("FAKE_INIT") ? atoi(getenv("FAKE_INIT")) : 0;
}
int cuGetExportTable(const void** table, const void*) {
    *table = nullptr;
    return 500;
}  // NVRTC asks
int cuDriverGetVersion(int* version) {
    *version = getenv("FAKE_VERSION") ? atoi(getenv("FAKE_VERSION")) : 13000;
    return 0;
}
int cuDeviceGetCount(int* count) {
    *count = getenv("FAKE_COUNT") ? atoi(getenv("FAKE_COUNT")) : 1;
    return 0;
}
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char* name, int size, int) {
    snprintf(name, size, "Fake GPU");
    return 0;
}
int cuDeviceTotalMem(size_t* bytes, int) {
    *bytes = size_t(64) << 20;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75:
            *value = capability / 10;
            break;
        case 76:
            *value = capability % 10;
            break;
        case 16:
            *value = 132;
            break;
        case 97:
            *value = 232448;
            break;
        case 38:
            *value = 50 << 20;
            break;
        default:
            *value = 0;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    *context = &blocks;
    return 0;
}
int cuCtxSetCurrent(void*) {
    STATUS;
    return 0;
}
int cuCtxSynchronize() {
    STATUS;
    return 0;
}
int cuGetErrorString(int code, const char** text) {
    *text = code == 700 ? "an illegal memory access was encountered" : "something failed";
    return 0;
}
int cuMemGetInfo(size_t* free, size_t* total) {
    *free = memory_left;
    *total = size_t(64) << 20;
    return 0;
}
int cuMemAlloc(void** pointer, size_t bytes) {
    STATUS;
    if (bytes > memory_left) return 2;
    *pointer = malloc(bytes);
    memset(*pointer, 0xff, bytes);
    blocks[*pointer] = bytes;
    memory_left -= bytes;
    return 0;
}
int cuMemFree(void* pointer) {
    if (!blocks.count(pointer)) return 1;
    memory_left += blocks[pointer];
    blocks.erase(pointer);
    free(pointer);
    return 0;
}
int cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
    STATUS;
    record = "host memory with flags " + std::to_string(flags);
    *pointer = malloc(bytes);
    return 0;
}
int cuMemFreeHost(void* pointer) {
    record = "freed host memory";
    free(pointer);
    return 0;
}
int cuMemsetD8Async(void* to, unsigned char byte, size_t bytes, void*) {
    STATUS;
    enqueue([=] { memset(to, byte, bytes); });
    return 0;
}
static int copy(void* to, const void* from, size_t bytes) {
    enqueue([=] { memcpy(to, from, bytes); });
    return 0;
}
int cuMemcpyHtoDAsync(void* to, const void* from, size_t bytes, void*) {
    STATUS;
    return copy(to, from, bytes);
}
int cuMemcpyDtoHAsync(void* to, const void* from, size_t bytes, void*) {
    STATUS;
    return copy(to, from, bytes);
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void*) {
    STATUS;
    return copy(to, from, bytes);
}
int cuStreamCreate(void** stream, unsigned) {
    *stream = malloc(1);
    return 0;
}
int cuStreamDestroy(void*) { return 0; }
int cuStreamSynchronize(void*) {
    STATUS;
    return 0;
}
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuEventCreate(void** event, unsigned) {
    *event = malloc(1);
    return 0;
}
int cuEventDestroy(void*) { return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventQuery(void*) {
    STATUS;
    return 0;
}
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void*, void*) {
    *ms = 1.5f;
    return 0;
}
int cuModuleLoadData(void** module, const void* image) {
    STATUS;
    if (memcmp(image, "\177ELF", 4) && !strstr(static_cast<const char*>(image), ".target sm_")) return 200;
    *module = malloc(1);
    return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    Function* made = new Function();
    made->name = name;
    sscanf(name, "static%d", &made->fixed);
    size_t offset = 0;
    for (const char* part = strchr(name, '_'); part; part = strchr(part + 1, '_')) {
        size_t size = atoi(part + 1);
        made->sizes.push_back(size);
        made->offsets.push_back(offset);
        offset += size;
    }
    *function = made;
    return 0;
}
int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
    if (index >= function->sizes.size()) return 1;
    *offset = function->offsets[index];
    *size = function->sizes[index];
    return 0;
}
int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    *value = attribute == 1 ? function->fixed : 0;
    return 0;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (attribute == 8) function->max_dynamic = value;
    if (attribute == 9) function->carveout = value;
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Function*, int, size_t) {
    *count = 2;
    return 0;
}
int cuLaunchKernelEx(const Configuration* config, Function* function, void** parameters, void**) {
    STATUS;
    const int shared = config->shared;
    if (shared + function->fixed > 48 << 10 && shared > function->max_dynamic) return 1;
    char text[512];
    snprintf(text, sizeof text, "%s grid %u %u %u threads %u %u %u shared %u attributes", function->name.c_str(),
             config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2],
             config->shared);
    std::string line = text;
    if (function->carveout >= 0) line += " carveout:" + std::to_string(function->carveout);
    for (unsigned i = 0; i < config->count; ++i)
        line += " " + std::to_string(config->attributes[i].id) + ":" + std::to_string(config->attributes[i].value[0]);
    line += " parameters";
    for (size_t i = 0; i < function->sizes.size(); ++i) {
        line += " ";
        for (size_t j = 0; j < function->sizes[i]; ++j) {
            snprintf(text, sizeof text, "%02x", static_cast<unsigned char*>(parameters[i])[j]);
            line += text;
        }
    }
    enqueue([=] {
        record = line;
        ++launches;
    });
    return 0;
}
int cuStreamBeginCapture(void*, int) {
    STATUS;
    capturing = true;
    captured.clear();
    return 0;
}
int cuStreamEndCapture(void*, void** graph) {
    capturing = false;
    *graph = new std::vector<std::function<void()>>(captured);
    return 0;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    *executable = new std::vector<std::function<void()>>(*static_cast<std::vector<std::function<void()>>*>(graph));
    return 0;
}
int cuGraphUpload(void*, void*) { return 0; }
int cuGraphLaunch(void* executable, void*) {
    STATUS;
    for (auto& work : *static_cast<std::vector<std::function<void()>>*>(executable)) work();
    return 0;
}
int cuGraphDestroy(void* graph) {
    delete static_cast<std::vector<std::function<void()>>*>(graph);
    return 0;
}
int cuGraphExecDestroy(void* graph) { return cuGraphDestroy(graph); }

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) {
    static void* self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&fake_fail), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *function = dlsym(self, name);
    if (found) *found = *function ? 0 : 1;
    return *function ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
