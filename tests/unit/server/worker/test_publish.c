/* test_publish.c - tensors that one client shows to others: who may attach, what attached regions
 * are good for, and what becomes of them when their owner takes them back, leaves or dies. */
#include "server/worker/publish.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig;
static int teacher, student;
static uint64_t teacher_region, student_region;

static void start(void) {
    rig_init(&rig);
    rig_start(&rig);
    teacher = rig_client(&rig);
    student = rig_client(&rig);
    teacher_region = rig_region(teacher, RIG_REGION_BYTES);
    student_region = rig_region(student, RIG_REGION_BYTES);
}

static void end(void) {
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

/* The second tensor of the region, as the op of the rig has it. */
static void publish_frame(union kld_frame *frame, uint64_t request, const char *name) {
    kld_frame_init(frame, KLD_FRAME_PUBLISH, request);
    struct kld_frame_publish *publish = &frame->as_PUBLISH;
    strcpy(publish->name, name);
    publish->region = teacher_region;
    publish->offset_bytes = RIG_TENSOR_BYTES;
    publish->tensor = (struct kld_wire_description){.dtype = KLD_DTYPE_FP32,
                                                    .form = KLD_FORM_LOGITS,
                                                    .rank = 2,
                                                    .shape = {RIG_ROWS, RIG_CLASSES}};
}

static void publish(const char *name) {
    union kld_frame frame;
    publish_frame(&frame, 500, name);
    rig_send(teacher, &frame);
    rig_expect(teacher, 500, KLD_FRAME_DONE, NULL);
}

static void send_attach(int fd, uint64_t request, uint32_t uid, const char *name) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_ATTACH, request);
    strcpy(frame.as_ATTACH.name, name);
    frame.as_ATTACH.uid = uid;
    rig_send(fd, &frame);
}

static void send_name(int fd, enum kld_frame_type type, uint64_t request, const char *name) {
    union kld_frame frame;
    kld_frame_init(&frame, type, request);
    strcpy(frame.as_DETACH.name, name);
    rig_send(fd, &frame);
}

static uint64_t attach_from(int fd, uint32_t uid, const char *name, uint32_t expected_uid) {
    union kld_frame frame;
    send_attach(fd, 501, uid, name);
    rig_expect(fd, 501, KLD_FRAME_ATTACHED, &frame);
    ck_assert_uint_eq(frame.as_ATTACHED.bytes, RIG_TENSOR_BYTES);
    ck_assert_uint_eq(frame.as_ATTACHED.tensor.form, KLD_FORM_LOGITS);
    ck_assert_uint_eq(frame.as_ATTACHED.tensor.shape[1], RIG_CLASSES);
    ck_assert_uint_eq(frame.as_ATTACHED.uid, expected_uid);
    return frame.as_ATTACHED.region;
}

static uint64_t attach(int fd, const char *name) {
    return attach_from(fd, KLD_WIRE_UID_OWN, name, geteuid());
}

/* Predictions and gradient of the student, targets of the teacher. */
static void submit(uint64_t request, uint64_t attached) {
    union kld_frame frame;
    rig_op(&frame, request, student_region);
    frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].region = attached;
    frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].offset_bytes = 0;
    rig_send(student, &frame);
}

START_TEST(attached_regions_are_read_and_not_written) {
    start();
    publish("teacher/logits");
    uint64_t attached = attach(student, "teacher/logits");
    submit(10, attached);
    rig_expect(student, 10, KLD_FRAME_DONE, NULL);

    union kld_frame frame;
    rig_op(&frame, 11, student_region);
    frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS].region = attached;
    frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = 0;
    rig_send(student, &frame);
    rig_expect_error(student, 11, KLD_FORBIDDEN, "grad_predictions: its region was attached");
    rig_op(&frame, 12, student_region);
    frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].region = attached;
    rig_send(student, &frame); /* beyond what was published, inside the teacher's region */
    rig_expect_error(student, 12, KLD_INVALID, "targets");

    kld_frame_init(&frame, KLD_FRAME_COPY, 13);
    frame.as_COPY.destination = student_region;
    frame.as_COPY.source = attached;
    frame.as_COPY.bytes = RIG_TENSOR_BYTES;
    rig_send(student, &frame);
    rig_expect(student, 13, KLD_FRAME_DONE, NULL);
    frame.as_COPY.destination = attached;
    frame.as_COPY.source = student_region;
    rig_send(student, &frame);
    rig_expect_error(student, 13, KLD_FORBIDDEN, "destination: its region was attached");

    publish_frame(&frame, 14, "again"); /* what is not its own */
    frame.as_PUBLISH.region = attached;
    frame.as_PUBLISH.offset_bytes = 0;
    rig_send(student, &frame);
    rig_expect_error(student, 14, KLD_FORBIDDEN, "only its owner publishes it");
    /* Attached bytes are in nobody's quota twice. */
    ck_assert_uint_eq(atomic_load(&rig.stats->value[KLD_STAT_worker_region_bytes]),
                      2 * RIG_REGION_BYTES);
    ck_assert_uint_eq(atomic_load(&rig.stats->value[KLD_STAT_worker_regions]), 3);
    rig_drop(student, 15, attached);
    rig_expect(student, 15, KLD_FRAME_DONE, NULL);
    submit(16, attached);
    rig_expect_error(student, 16, KLD_NOT_FOUND, "no region");
    close(teacher);
    close(student);
    end();
}
END_TEST

START_TEST(publications_are_checked) {
    start();
    union kld_frame frame;
    send_attach(student, 1, KLD_WIRE_UID_OWN, "nothing");
    rig_expect_error(student, 1, KLD_NOT_FOUND, "no tensor of this name");
    publish_frame(&frame, 2, "two words");
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 2, KLD_INVALID, "without blanks");
    publish_frame(&frame, 3, "t");
    frame.as_PUBLISH.region += 1;
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 3, KLD_NOT_FOUND, "no region");
    publish_frame(&frame, 4, "t");
    frame.as_PUBLISH.offset_bytes = 2 * RIG_TENSOR_BYTES + 4;
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 4, KLD_INVALID, "do not fit a region");
    publish_frame(&frame, 5, "t");
    frame.as_PUBLISH.reserved = 1;
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 5, KLD_INVALID, "PUBLISH: reserved field is not 0");
    frame.as_PUBLISH.reserved = 0;
    frame.as_PUBLISH.uids_count = 9;
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 5, KLD_INVALID, "names 9 users");
    publish_frame(&frame, 6, "t");
    frame.as_PUBLISH.uids[0] = 5; /* not counted */
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 6, KLD_INVALID, "names 0 users");
    publish("t");
    publish_frame(&frame, 7, "t");
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 7, KLD_EXISTS, "publishes a tensor of that name already");
    send_name(student, KLD_FRAME_DETACH, 8, "t");
    rig_expect_error(student, 8, KLD_NOT_FOUND, "this connection published no tensor");
    for (uint64_t i = 1; i < rig.config.user_publications_max; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", (int)i);
        publish(name);
    }
    publish_frame(&frame, 9, "one/more");
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 9, KLD_TOO_LARGE, "1024 tensors are published by this user");
    union kld_frame holed;
    kld_frame_init(&holed, KLD_FRAME_ATTACH, 10);
    strcpy(holed.as_ATTACH.name, "t");
    holed.as_ATTACH.reserved = 1;
    rig_send(student, &holed);
    rig_expect_error(student, 10, KLD_INVALID, "reserved field");
    close(teacher);
    close(student);
    end();
}
END_TEST

START_TEST(detached_means_gone) {
    start();
    publish("t");
    publish("other");
    uint64_t first = attach(student, "t"), second = attach(student, "t"),
             other = attach(student, "other");
    send_name(teacher, KLD_FRAME_DETACH, 1, "t");
    rig_expect(teacher, 1, KLD_FRAME_DONE, NULL);
    submit(2, first);
    rig_expect_error(student, 2, KLD_GONE, "no longer published");
    submit(3, second);
    rig_expect_error(student, 3, KLD_GONE, "targets: the tensor behind region");
    submit(4, other);
    rig_expect(student, 4, KLD_FRAME_DONE, NULL);
    send_attach(student, 5, KLD_WIRE_UID_OWN, "t");
    rig_expect_error(student, 5, KLD_NOT_FOUND, "no tensor of this name");
    rig_drop(student, 6, first);
    rig_expect(student, 6, KLD_FRAME_DONE, NULL);
    publish("t"); /* the name is free again; what is gone stays gone */
    submit(7, second);
    rig_expect_error(student, 7, KLD_GONE, "no longer published");
    submit(8, attach(student, "t"));
    rig_expect(student, 8, KLD_FRAME_DONE, NULL);
    close(student);
    close(teacher);
    end();
}
END_TEST

/* The owner lets go while a student's job runs: that ends well, the memory goes behind it, the next
 * use is an error. */
static void check_owner_goes(bool dies) {
    start();
    publish("t");
    uint64_t attached = attach(student, "t");
    atomic_store(&rig.fake.hold, true);
    submit(10, attached);
    rig_until(&rig.fake.jobs_started, 1);
    submit(11, attached); /* in the lane behind it */
    rig_plain(student, KLD_FRAME_PING, 12);
    rig_expect(student, 12, KLD_FRAME_PONG, NULL);
    if (dies) {
        close(teacher);
        rig_until_stat(&rig, KLD_STAT_unix_clients, 1);
    } else {
        rig_drop(teacher, 13, teacher_region);
        rig_expect(teacher, 13, KLD_FRAME_DONE, NULL);
    }
    submit(14, attached);
    rig_expect_error(student, 14, KLD_GONE, "its owner took it back or is gone");
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 2);
    atomic_store(&rig.fake.hold, false);
    rig_expect(student, 10, KLD_FRAME_DONE, NULL);
    rig_expect(student, 11, KLD_FRAME_DONE, NULL);
    rig_until_is(&rig.fake.memories, 1);
    submit(15, attached);
    rig_expect_error(student, 15, KLD_GONE, "no longer published");
    close(student);
    if (!dies)
        close(teacher);
    end();
}

START_TEST(owner_drops_the_region_under_a_job) { check_owner_goes(false); }
END_TEST

START_TEST(owner_dies_under_a_job) { check_owner_goes(true); }
END_TEST

START_TEST(student_goes_under_its_job) {
    start();
    publish("t");
    uint64_t attached = attach(student, "t");
    atomic_store(&rig.fake.hold, true);
    submit(10, attached);
    rig_until(&rig.fake.jobs_started, 1);
    rig_drop(student, 11, attached);
    rig_expect(student, 11, KLD_FRAME_DONE, NULL);
    attach(student, "t");
    close(student);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 1);
    rig_drop(teacher, 12, teacher_region); /* both gone, and the job still has both memories */
    rig_expect(teacher, 12, KLD_FRAME_DONE, NULL);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 2);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.memories, 0);
    close(teacher);
    end();
}
END_TEST

/* Both names of one memory in one request: overlap is seen through them. */
START_TEST(an_owner_that_attaches_sees_one_memory) {
    start();
    publish("t");
    uint64_t attached = attach(teacher, "t");
    union kld_frame frame;
    rig_op(&frame, 10, teacher_region);
    frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].region = attached;
    frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].offset_bytes = 0;
    rig_send(teacher, &frame);
    rig_expect(teacher, 10, KLD_FRAME_DONE, NULL);
    frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = RIG_TENSOR_BYTES + 4;
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 10, KLD_INVALID, "grad_predictions overlaps targets");
    close(teacher); /* the region, its publication and what is attached to it, in one go */
    close(student);
    end();
}
END_TEST

START_TEST(elements_are_aligned_in_memory_and_not_only_in_the_region) {
    start();
    union kld_frame frame;
    publish_frame(&frame, 1, "odd");
    frame.as_PUBLISH.offset_bytes = 2;
    frame.as_PUBLISH.tensor.dtype = KLD_DTYPE_BF16;
    frame.as_PUBLISH.tensor.shape[0] = 2 * RIG_ROWS;
    rig_send(teacher, &frame);
    rig_expect(teacher, 1, KLD_FRAME_DONE, NULL);
    submit(2, attach(student, "odd")); /* as FP32 */
    rig_expect_error(student, 2, KLD_INVALID, "does not begin at a multiple");
    close(teacher);
    close(student);
    end();
}
END_TEST

/* A client whose user is another one: credentials are the thread's when it connects. */
static int client_as(uid_t uid) {
    ck_assert_int_eq(syscall(SYS_setresuid, -1, uid, -1), 0);
    int fd = rig_client(&rig);
    ck_assert_int_eq(syscall(SYS_setresuid, -1, 0, -1), 0);
    return fd;
}

START_TEST(users_are_told_apart) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    start();
    union kld_frame frame;
    publish("mine");
    publish_frame(&frame, 1, "ours");
    frame.as_PUBLISH.uids_count = 2;
    frame.as_PUBLISH.uids[0] = 12;
    frame.as_PUBLISH.uids[1] = 1234;
    rig_send(teacher, &frame);
    rig_expect(teacher, 1, KLD_FRAME_DONE, NULL);
    int named = client_as(1234), other = client_as(1235);
    send_attach(named, 2, 0, "mine");
    rig_expect_error(named, 2, KLD_NOT_FOUND, "by user 0 for this user");
    attach_from(named, 0, "ours", 0);
    send_attach(named, 3, KLD_WIRE_UID_OWN, "ours"); /* is nobody's but its owner's */
    rig_expect_error(named, 3, KLD_NOT_FOUND, "by this user; to attach to another user's");
    send_attach(other, 3, 0, "ours");
    rig_expect_error(other, 3, KLD_NOT_FOUND, "by user 0 for this user");
    send_attach(other, 4, 12, "ours");
    rig_expect_error(other, 4, KLD_NOT_FOUND, "by user 12");
    attach(student, "ours"); /* the owner's own user */
    close(named);
    close(other);
    close(teacher);
    close(student);
    end();
}
END_TEST

/* Nobody takes a name away from another user, shows him a tensor in another one's place, detaches
 * his, or uses up his share. */
START_TEST(names_are_each_users_own) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    rig_init(&rig);
    rig.config.user_publications_max = 2;
    rig_start(&rig);
    teacher = rig_client(&rig);
    student = rig_client(&rig);
    teacher_region = rig_region(teacher, RIG_REGION_BYTES);
    int squatter = client_as(1234), victim = client_as(1235);
    uint64_t owners = teacher_region;
    teacher_region = rig_region(squatter, RIG_REGION_BYTES);
    union kld_frame frame;
    for (int i = 0; i < 3; i++) {
        publish_frame(&frame, 1, i == 0 ? "t" : i == 1 ? "u" : "v");
        frame.as_PUBLISH.uids_count = 2; /* shown to everybody whom it could take in */
        frame.as_PUBLISH.uids[0] = 0;
        frame.as_PUBLISH.uids[1] = 1235;
        rig_send(squatter, &frame);
        if (i < 2)
            rig_expect(squatter, 1, KLD_FRAME_DONE, NULL);
        else
            rig_expect_error(squatter, 1, KLD_TOO_LARGE, "2 tensors are published by this user");
    }
    send_attach(student, 2, KLD_WIRE_UID_OWN, "t");
    rig_expect_error(student, 2, KLD_NOT_FOUND, "by this user");
    send_attach(victim, 2, 0, "t");
    rig_expect_error(victim, 2, KLD_NOT_FOUND, "by user 0");
    attach_from(victim, 1234, "t", 1234);
    teacher_region = owners;
    publish("t"); /* the name was not taken */
    attach(student, "t");
    send_name(squatter, KLD_FRAME_DETACH, 3, "t");
    rig_expect(squatter, 3, KLD_FRAME_DONE, NULL); /* its own */
    attach(student, "t");
    close(squatter);
    close(victim);
    close(teacher);
    close(student);
    end();
}
END_TEST

/* Of all that there may be, however many one user is let have. */
START_TEST(no_user_publishes_all_there_may_be) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    rig_init(&rig);
    rig.config.user_publications_max = KLD_PUBLICATIONS_MAX;
    rig_start(&rig);
    teacher = client_as(1234);
    student = client_as(1235);
    student_region = rig_region(student, RIG_REGION_BYTES);
    teacher_region = rig_region(teacher, RIG_REGION_BYTES);
    char name[16];
    union kld_frame frame;
    for (int i = 0; i < KLD_PUBLICATIONS_MAX / 4 * 3; i++) {
        snprintf(name, sizeof name, "t%d", i);
        publish(name);
    }
    publish_frame(&frame, 1, "one");
    rig_send(teacher, &frame);
    rig_expect_error(teacher, 1, KLD_TOO_LARGE,
                     "3072 tensors are published by this user, the most "
                     "allowed beside those of others");
    teacher_region = student_region;
    publish_frame(&frame, 2, "one");
    rig_send(student, &frame);
    rig_expect(student, 2, KLD_FRAME_DONE, NULL);
    close(teacher);
    close(student);
    end();
}
END_TEST

UNIT_MAIN("server/worker/publish", names_are_each_users_own, no_user_publishes_all_there_may_be,
          attached_regions_are_read_and_not_written, publications_are_checked, detached_means_gone,
          owner_drops_the_region_under_a_job, owner_dies_under_a_job, student_goes_under_its_job,
          an_owner_that_attaches_sees_one_memory,
          elements_are_aligned_in_memory_and_not_only_in_the_region, users_are_told_apart)
