package e2e

import (
	"cmp"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// step is one of the tutorial.
type step struct {
	title, commands, result string
}

// stepsOf reads the steps of a page: headings that begin with a number, each
// with one block of commands and one of what they print.
func stepsOf(t *testing.T, page string) (steps []step) {
	t.Helper()
	block := regexp.MustCompile("(?ms)^```(\\w+)\n(.*?)^```\n")
	for _, section := range regexp.MustCompile(`(?m)^## `).Split(page, -1)[1:] {
		title, text, _ := strings.Cut(section, "\n")
		s := step{title: title}
		for _, b := range block.FindAllStringSubmatch(text, -1) {
			switch {
			case b[1] == "sh" && s.commands == "":
				s.commands = b[2]
			case b[1] == "text" && s.result == "":
				s.result = b[2]
			default:
				t.Fatalf("%s: expected one block of commands and one of their result, found another one of %s", title, b[1])
			}
		}
		steps = append(steps, s)
	}
	return steps
}

// TestTheTutorialShowsWhatItSays follows docs/tutorial.md in a copy of the
// repository, on ports that are free. It leaves out what needs another machine.
func TestTheTutorialShowsWhatItSays(t *testing.T) {
	page, err := os.ReadFile("../docs/tutorial.md")
	if err != nil {
		t.Fatal(err)
	}
	steps := stepsOf(t, string(page))
	if len(steps) != 10 {
		t.Fatalf("found %d steps, expected 10", len(steps))
	}
	addresses, err := freeAddresses(5)
	if err != nil {
		t.Fatal(err)
	}
	replaced := []string{"https://llm.example.com", "localhost:8080"}
	for i, port := range []string{"2019", "8080", "9001", "9002", "9003"} {
		_, free, _ := net.SplitHostPort(addresses[i])
		replaced = append(replaced, ":"+port, ":"+free)
	}
	ports := strings.NewReplacer(replaced[2:]...)

	dir := t.TempDir()
	repository := copyRepository(t, dir)
	files, _ := filepath.Glob(filepath.Join(repository, "examples/tutorial/*.Caddyfile"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, file, ports.Replace(string(text)))
	}

	elsewhere := regexp.MustCompile(`(?m)^(git clone|sudo) .*\n`)
	script := "trap './caddy stop 2>/dev/null' EXIT\n"
	for _, s := range steps {
		commands := strings.ReplaceAll(s.commands, replaced[0], replaced[1])
		script += "echo '== step'\n" + ports.Replace(elsewhere.ReplaceAllString(commands, ""))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	bash := exec.CommandContext(ctx, "bash", "-c", script)
	bash.Dir = repository
	_, admin, _ := net.SplitHostPort(addresses[0])
	// with -trimpath, what is compiled does not depend on the folder
	bash.Env = append(os.Environ(), "CADDY_ADMIN=localhost:"+admin, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir,
		"GOFLAGS="+cmp.Or(os.Getenv("GOFLAGS"), "-trimpath"))
	stderr, err := os.Create(filepath.Join(dir, "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer stderr.Close()
	bash.Stderr = stderr
	out, err := bash.Output()
	if err != nil {
		said, _ := os.ReadFile(stderr.Name())
		t.Fatalf("%v\n%s\n%s", err, out, said)
	}
	shown := strings.Split(string(out), "== step\n")[1:]
	for i, s := range steps {
		if !fits(ports.Replace(s.result), shown[i]) {
			t.Errorf("%s: expected\n%s\ngot\n%s", s.title, s.result, shown[i])
		}
	}
	if t.Failed() {
		said, _ := os.ReadFile(stderr.Name())
		t.Logf("the commands said:\n%s", said)
	}
}

// copyRepository copies what git has, or would have, into a folder.
func copyRepository(t *testing.T, dir string) (repository string) {
	t.Helper()
	repository = filepath.Join(dir, "repository")
	copied := exec.Command("bash", "-c", `git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$0"`, repository)
	copied.Dir = ".."
	if err := os.Mkdir(repository, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return repository
}

// fits reports whether a text is what a page shows, in which … stands for
// anything in a line. Spaces at the end of a line do not count.
func fits(page, text string) bool {
	pattern := strings.ReplaceAll(regexp.QuoteMeta(page), "…", "[^\n]*")
	return regexp.MustCompile("^" + pattern + "$").MatchString(strings.ReplaceAll(text, " \n", "\n"))
}
