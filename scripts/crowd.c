/* Crowd starts processes in control groups: for every line "DIRECTORY NUMBER DEVICE CALLS" of its input, NUMBER of them, each of which opens the
 * device, makes CALLS kinds of calls to it and then waits. It prints their PIDs, and ends with them when its input does. A device of "-" is none. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
	char dir[4096], device[256], file[4200];
	int number, calls, ready[2];
	pid_t parent = getpid();

	if (pipe(ready))
		return 1;
	signal(SIGCHLD, SIG_IGN);
	while (scanf("%4000s %d %200s %d", dir, &number, device, &calls) == 4) {
		snprintf(file, sizeof file, "%s/cgroup.procs", dir);
		for (int i = 0; i < number; i++) {
			pid_t pid = fork();

			if (pid < 0) {
				perror("crowd: fork");
				return 1;
			}
			if (!pid) {
				int fd = open(file, O_WRONLY);
				char ok = 'y';

				prctl(PR_SET_PDEATHSIG, SIGKILL);
				if (getppid() != parent)
					_exit(1);
				if (fd < 0 || write(fd, "0", 1) != 1)
					ok = 'n';
				close(fd);
				close(0);
				fd = strcmp(device, "-") ? open(device, O_RDWR) : -1;
				for (int nr = 0; fd >= 0 && nr < calls; nr++)
					ioctl(fd, 0x4620 + nr, 0);
				write(ready[1], &ok, 1);
				close(ready[1]);
				for (;;)
					pause();
			}
			char ok;
			if (read(ready[0], &ok, 1) != 1 || ok != 'y') {
				fprintf(stderr, "crowd: no process in %s\n", dir);
				return 1;
			}
			printf("%d\n", pid);
		}
		fflush(stdout);
	}
	return 0;
}
