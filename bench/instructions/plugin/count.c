// A plugin for QEMU's user mode that counts how often each block of a program
// was executed, and writes a line for each at the end: the block's address, its
// length in instructions, and the count. QEMU's headers are not needed: these
// are version 1 of its plugin API, in docs/devel/tcg-plugins.rst there.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_info;

extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
	void (*cb)(qemu_plugin_id_t, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int op, void *to, uint64_t by);
extern void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*cb)(qemu_plugin_id_t, void *), void *data);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);

enum { ADD = 0, BLOCKS = 4096 };

struct block {
	uint64_t address, length, count;
};

// A list of arrays, because a block must stay where its count is.
struct list {
	struct list *next;
	int used;
	struct block blocks[BLOCKS];
};

static struct list *lists;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	struct block *b;

	pthread_mutex_lock(&mutex);
	if (lists == NULL || lists->used == BLOCKS) {
		struct list *begun = calloc(1, sizeof *begun);

		if (begun == NULL)
			abort();
		begun->next = lists;
		lists = begun;
	}
	b = &lists->blocks[lists->used++];
	pthread_mutex_unlock(&mutex);
	b->address = qemu_plugin_tb_vaddr(tb);
	b->length = qemu_plugin_tb_n_insns(tb);
	qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD, &b->count, 1);
}

static void ended(qemu_plugin_id_t id, void *data)
{
	FILE *to = fopen(getenv("COUNTS"), "w");

	if (to == NULL)
		abort();
	for (struct list *l = lists; l != NULL; l = l->next)
		for (int i = 0; i < l->used; i++)
			fprintf(to, "%lx %lu %lu\n", (unsigned long)l->blocks[i].address,
				(unsigned long)l->blocks[i].length, (unsigned long)l->blocks[i].count);
	fclose(to);
}

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info,
	int argc, char **argv)
{
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_atexit_cb(id, ended, NULL);
	return 0;
}
