// A 32-bit program without a C library: opens a device, then calls it 1000 times for every byte of its input.
// Usage: compat DEVICE
static long call(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory");
	return result;
}

enum { EXIT = 1, READ = 3, WRITE = 4, OPEN = 5, IOCTL = 54 };

__attribute__((used)) void run(char **argv)
{
	long fd = call(OPEN, (long)argv[1], 2, 0);
	char c;

	do {
		call(WRITE, 1, (long)"ready\n", 6);
		if (call(READ, 0, (long)&c, 1) <= 0)
			call(EXIT, fd < 0, 0, 0);
		for (int i = 0; i < 1000; i++)
			call(IOCTL, fd, 0x4611, 0);
	} while (1);
}

__asm__(".globl _start\n_start: lea 4(%esp), %eax\npush %eax\ncall run\n");
