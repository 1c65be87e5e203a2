/* handle.c - which card the memory behind a cudaIpcMemHandle_t lies on. CUDA does not say: a handle
 * of any card opens, and what is opened is told to lie on the card of who opened it. The handle
 * itself names its card, by PCI address as in nvidia-smi, in a place that is documented nowhere. So
 * a handle of our own is made when the first one comes, once more if that failed, and only where
 * this process, the size and our card are found in it at the places where an H200's driver (580)
 * has them are other handles read so; else nothing is known, and nothing refused. Opens nothing. */
#include "kernels/cuda/device.h"

#include <string.h>
#include <unistd.h>

#define LOOKS_MAX 2
#define PROBE_BYTES ((uint64_t)2 << 20)
#define PID_AT 8
#define BYTES_AT 16
#define CARD_AT 32

static uint32_t word_at(const uint8_t *handle, size_t at) {
    uint32_t word;
    memcpy(&word, handle + at, sizeof word);
    return word;
}

uint32_t cuda_card_number(int ordinal) {
    struct cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess)
        return 0;
    return ((uint32_t)properties.pciDomainID & 0xffff) << 16 |
           ((uint32_t)properties.pciBusID & 0xff) << 8 | ((uint32_t)properties.pciDeviceID & 0xff);
}

static void learn(struct cuda_device *device) {
    void *at = NULL;
    uint8_t handle[64] = {0};
    cudaIpcMemHandle_t ipc;
    uint32_t card = device->card;
    if (cudaMalloc(&at, PROBE_BYTES) == cudaSuccess) {
        if (cudaIpcGetMemHandle(&ipc, at) == cudaSuccess)
            memcpy(handle, &ipc, sizeof handle);
        cudaFree(at);
    }
    cudaGetLastError();
    device->handles_name_cards = card && word_at(handle, PID_AT) == (uint32_t)getpid() &&
                                 word_at(handle, BYTES_AT) == PROBE_BYTES &&
                                 word_at(handle, BYTES_AT + 4) == 0 &&
                                 word_at(handle, CARD_AT) == card;
    device->handles_looked_at++;
    atomic_store(&device->handles_unread, !device->handles_name_cards);
}

bool cuda_handles_unread(struct kld_device *base) {
    return atomic_load(&((struct cuda_device *)base)->handles_unread);
}

enum kld_status cuda_handle_check(struct cuda_device *device, const uint8_t handle[64],
                                  struct kld_error *err) {
    uint32_t card = word_at(handle, CARD_AT);
    pthread_mutex_lock(&device->setup_mutex);
    if (!device->handles_name_cards && device->handles_looked_at < LOOKS_MAX)
        learn(device);
    bool reached = !device->handles_name_cards || card == device->card;
    pthread_mutex_unlock(&device->setup_mutex);
    for (uint32_t i = 0; i < device->peers_count && !reached; i++)
        reached = card == device->peers[i].card;
    return reached
               ? KLD_OK
               : kld_error_set(err, KLD_INVALID,
                               "the memory behind the CUDA handle lies on another device than "
                               "the UUID beside it says, or the handle is none; expected memory "
                               "of this device");
}
