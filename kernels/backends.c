/* backends.c - the list of back ends; the only file that names them both.
 * Opens nothing by itself. Any thread. */
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/cpu.h"
#ifdef KLD_WITH_CUDA
#include "kernels/cuda/cuda.h"
#endif

static const struct kld_backend *const backends[] = {
#ifdef KLD_WITH_CUDA
    &kld_backend_cuda,
#endif
    &kld_backend_cpu,
    NULL,
};

const struct kld_backend *const *kld_backends(void) { return backends; }

const char *kld_backends_release(void) { return KLD_BUILD; }

enum kld_status kld_backend_find(const char *name, const struct kld_backend **ret_backend,
                                 struct kld_error *err) {
    bool any = strcmp(name, "auto") == 0;
    for (size_t i = 0; backends[i]; i++) {
        uint32_t count = 0;
        enum kld_status status = any ? backends[i]->device_count(&count, err) : KLD_OK;
        if (status == KLD_BUSY)
            return status;
        if (any && (status || count == 0))
            continue;
        if (any || strcmp(name, backends[i]->name) == 0) {
            *ret_backend = backends[i];
            return KLD_OK;
        }
    }
    return kld_error_set(err, KLD_NOT_FOUND, "no back end '%.20s' in this build; it has: auto%s%s",
                         name, backends[1] ? ", cuda" : "", ", cpu");
}
