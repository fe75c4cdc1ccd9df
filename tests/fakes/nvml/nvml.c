// A libnvidia-ml.so.1 without a GPU, driven by the text file FAKE_NVML_STATE: lines "key value", replaced atomically.
//   count 8              GPUs                       gpuN.KEY V  or  KEY V      one GPU, or all
//   temp util power clock throttle mem_total mem_used ecc_ce ecc_ue remap_ue remap_pending remap_failure retired
//   retired_pending nvlinks nvlink_down nvlink_errors (replays) nvlink_recoveries pcie_width pcie_replays recovery pid pid_mem
//   lost 1               every call about it: GPU is lost          reset 1   reset required
//   hang_ms N            every call about it sleeps so long         init N    nvmlInit returns N
//   unsupported_power 1  that call: not supported                  unreadable_power 1   unknown error
//   xid_seq N            a new number: one event of Xid `xid` on GPU `xid_gpu`
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int ret;
typedef void *dev;
enum { MOST = 512 };
static char devices[64];
static struct { char name[64]; long value; } table[MOST];
static int rows;
static struct timespec read_at;
static ino_t read_inode;

static void refresh(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_ino == read_inode && now.st_mtim.tv_sec == read_at.tv_sec && now.st_mtim.tv_nsec == read_at.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    rows = 0;
    while (rows < MOST && fscanf(file, "%63s %ld", table[rows].name, &table[rows].value) == 2) rows++;
    fclose(file);
    read_at = now.st_mtim;
    read_inode = now.st_ino;
}
static long get(const char *name, long otherwise) {
    refresh();
    for (int row = 0; row < rows; row++)
        if (!strcmp(table[row].name, name)) return table[row].value;
    return otherwise;
}
static long of(dev d, const char *name, long otherwise) {
    char own[96];
    snprintf(own, sizeof own, "gpu%d.%s", (int)((char *)d - devices), name);
    return get(own, get(name, otherwise));
}
static ret enter(dev d, const char *call) {
    char name[96];
    long hang = of(d, "hang_ms", 0);
    if (hang) usleep(1000 * hang);
    if (of(d, "lost", 0)) return 15;
    if (of(d, "reset", 0)) return 16;
    snprintf(name, sizeof name, "unsupported_%s", call);
    if (of(d, name, 0)) return 3;
    snprintf(name, sizeof name, "unreadable_%s", call);
    return of(d, name, 0) ? 999 : 0;
}
#define ENTER(call) do { ret r_ = enter(d, call); if (r_) return r_; } while (0)

ret nvmlInit_v2(void) { return (ret)get("init", 0); }
ret nvmlInitWithFlags(unsigned flags) { (void)flags; return (ret)get("init", 0); }
ret nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(ret r) {
    return r == 3 ? "Not Supported" : r == 9 ? "Driver Not Loaded" : r == 10 ? "Timeout" : r == 15 ? "GPU is lost"
         : r == 16 ? "GPU requires reset" : r == 18 ? "RM has detected an NVML/RM version mismatch." : "Unknown Error";
}
ret nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.fake"); return 0; }
ret nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)get("count", 2); return 0; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned index, dev *d) {
    if (index >= (unsigned)get("count", 2)) return 2;
    *d = &devices[index];
    return of(*d, "lost", 0) ? 15 : 0;
}
ret nvmlDeviceGetName(dev d, char *text, unsigned size) { snprintf(text, size, "Fake %d", (int)((char *)d - devices)); return 0; }
ret nvmlDeviceGetUUID(dev d, char *text, unsigned size) { snprintf(text, size, "GPU-fake-%d", (int)((char *)d - devices)); return 0; }
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
ret nvmlDeviceGetPciInfo_v3(dev d, pci *p) {
    memset(p, 0, sizeof *p);
    p->bus = 0x10 + (unsigned)((char *)d - devices);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus);
    return 0;
}
typedef struct { unsigned long long total, free, used; } memory;
ret nvmlDeviceGetMemoryInfo(dev d, memory *m) {
    ENTER("memory");
    m->total = of(d, "mem_total", 80L << 30); m->used = of(d, "mem_used", 1L << 30); m->free = m->total - m->used;
    return 0;
}
typedef struct { unsigned gpu, memory; } rates;
ret nvmlDeviceGetUtilizationRates(dev d, rates *r) { ENTER("utilization"); r->gpu = of(d, "util", 50); r->memory = 10; return 0; }
ret nvmlDeviceGetTemperature(dev d, int kind, unsigned *t) { (void)kind; ENTER("temperature"); *t = of(d, "temp", 40); return 0; }
typedef struct { unsigned version; int kind, temperature; } temperature;
ret nvmlDeviceGetTemperatureV(dev d, temperature *t) { ENTER("temperature"); t->temperature = of(d, "temp", 40); return 0; }
ret nvmlDeviceGetPowerUsage(dev d, unsigned *milliwatts) { ENTER("power"); *milliwatts = of(d, "power", 300000); return 0; }
ret nvmlDeviceGetClockInfo(dev d, int kind, unsigned *megahertz) { (void)kind; ENTER("clock"); *megahertz = of(d, "clock", 1980); return 0; }
ret nvmlDeviceGetCurrentClocksEventReasons(dev d, unsigned long long *bits) { ENTER("throttle"); *bits = of(d, "throttle", 0); return 0; }
ret nvmlDeviceGetCurrentClocksThrottleReasons(dev d, unsigned long long *bits) { return nvmlDeviceGetCurrentClocksEventReasons(d, bits); }
ret nvmlDeviceGetTotalEccErrors(dev d, int kind, int scope, unsigned long long *count) {
    (void)scope; ENTER("ecc"); *count = of(d, kind ? "ecc_ue" : "ecc_ce", 0); return 0;
}
ret nvmlDeviceGetRemappedRows(dev d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    ENTER("remapped");
    *corrected = 0; *uncorrected = of(d, "remap_ue", 0); *pending = of(d, "remap_pending", 0); *failure = of(d, "remap_failure", 0);
    return 0;
}
ret nvmlDeviceGetRetiredPages(dev d, int cause, unsigned *count, unsigned long long *pages) {
    unsigned have = cause ? 0 : (unsigned)of(d, "retired", 0), room = *count;
    ENTER("retired");
    *count = have;
    if (have > room) return 7;
    if (pages) for (unsigned i = 0; i < have; i++) pages[i] = i;
    return 0;
}
ret nvmlDeviceGetRetiredPagesPendingStatus(dev d, int *pending) { ENTER("retired"); *pending = of(d, "retired_pending", 0); return 0; }
ret nvmlDeviceGetNvLinkState(dev d, unsigned link, int *active) {
    ENTER("links");
    if (link >= (unsigned)of(d, "nvlinks", 4)) return 2;
    *active = link >= (unsigned)of(d, "nvlink_down", 0);
    return 0;
}
ret nvmlDeviceGetNvLinkErrorCounter(dev d, unsigned link, int counter, unsigned long long *count) {
    (void)link; ENTER("links");
    *count = counter > 1 ? 0 : of(d, counter ? "nvlink_recoveries" : "nvlink_errors", 0);
    return 0;
}
ret nvmlDeviceGetPcieReplayCounter(dev d, unsigned *count) { ENTER("pcie"); *count = of(d, "pcie_replays", 0); return 0; }
ret nvmlDeviceGetCurrPcieLinkWidth(dev d, unsigned *width) { ENTER("pcie"); *width = of(d, "pcie_width", 16); return 0; }
ret nvmlDeviceGetMaxPcieLinkWidth(dev d, unsigned *width) { (void)d; *width = 16; return 0; }
ret nvmlDeviceGetCurrPcieLinkGeneration(dev d, unsigned *generation) { (void)d; *generation = 5; return 0; }
typedef struct { unsigned id, scope; long long timestamp, latency; int type; ret code; union { double d; unsigned u; long long ll; } value; } field;
ret nvmlDeviceGetFieldValues(dev d, int count, field *fields) {
    ENTER("recovery");
    for (int i = 0; i < count; i++) { fields[i].code = 0; fields[i].type = 1; fields[i].value.ll = 0; fields[i].value.u = of(d, "recovery", 0); }
    return 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
ret nvmlDeviceGetComputeRunningProcesses_v3(dev d, unsigned *count, process *found) {
    long pid = of(d, "pid", 0);
    unsigned room = *count;
    ENTER("processes");
    *count = pid ? 1 : 0;
    if (*count > room) return 7;
    if (pid && found) { found[0].pid = pid; found[0].used = of(d, "pid_mem", 1L << 30); found[0].gi = found[0].ci = ~0u; }
    return 0;
}
static int set;
static long seen;
ret nvmlEventSetCreate(void **s) { *s = &set; seen = get("xid_seq", 0); return 0; }
ret nvmlEventSetFree(void *s) { (void)s; return 0; }
ret nvmlDeviceGetSupportedEventTypes(dev d, unsigned long long *types) { (void)d; *types = 0x8; return 0; }
ret nvmlDeviceRegisterEvents(dev d, unsigned long long types, void *s) { (void)d; (void)types; (void)s; return 0; }
typedef struct { dev device; unsigned long long type, data; unsigned gi, ci; } event;
ret nvmlEventSetWait_v2(void *s, event *e, unsigned milliseconds) {
    (void)s;
    for (unsigned passed = 0; passed <= milliseconds; passed += 20) {
        long number = get("xid_seq", 0);
        if (number > seen) {
            seen = number;
            memset(e, 0, sizeof *e);
            e->device = &devices[get("xid_gpu", 0)]; e->type = 0x8; e->data = get("xid", 79);
            return 0;
        }
        usleep(20000);
    }
    return 10;
}
