package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// tools are the programs that this command builds, and the folder of those that
// it installs.
type tools struct {
	self     string // this command
	caddy    string // Caddy with the module and the simulator
	httputil string
	cert     string // a certificate, and its key beside it
	dir      string // scratch
	cache    string // what npm and pip install
}

// build makes what is made of the code here. The command runs in bench/.
func build(dir string) (t tools, err error) {
	t = tools{self: dir + "/bin/bench", caddy: dir + "/bin/caddy", httputil: dir + "/bin/httputil",
		cert: dir + "/cert.pem", dir: dir}
	cache, err := os.UserCacheDir()
	if err != nil {
		return t, err
	}
	t.cache = filepath.Join(cache, "openai-lb-bench")
	for _, b := range []struct{ in, what, to string }{
		{"..", "./cmd/caddy", t.caddy}, {".", "./contenders/httputil", t.httputil}, {".", ".", t.self},
	} {
		command := exec.Command("go", "build", "-o", b.to, b.what)
		command.Dir = b.in
		if out, err := command.CombinedOutput(); err != nil {
			return t, fmt.Errorf("go build %s: %w\n%s", b.what, err, out)
		}
	}
	return t, writeCertificate(t.cert)
}

// install has npm or pip install into the cache what is not there yet, and
// reads the version of it from a file.
func (t tools) install(name, file, pattern string, argv ...string) (version string, err error) {
	dir := filepath.Join(t.cache, name)
	if _, err := os.Stat(filepath.Join(dir, file)); err != nil {
		fmt.Printf("installing %s into %s\n", name, dir)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", err
		}
		command := exec.Command(argv[0], argv[1:]...)
		command.Dir = dir
		if out, err := command.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
		}
	}
	return output(pattern, "cat", filepath.Join(dir, file))
}

// installPython does so with a virtual environment.
func (t tools) installPython(name, module string, packages ...string) (version string, err error) {
	dir := filepath.Join(t.cache, name)
	if _, err := t.install(name, "bin/pip", "", "python3", "-m", "venv", dir); err != nil {
		return "", err
	}
	found := []string{dir + "/bin/python", "-c", "import importlib.metadata as m; print(m.version('" + module + "'))"}
	if version, err := output(`(\S+)`, found...); err == nil {
		return version, nil
	}
	fmt.Printf("installing %s into %s\n", name, dir)
	if out, err := exec.Command(dir+"/bin/pip",
		append([]string{"install", "-q"}, packages...)...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("pip install %s: %w\n%s", strings.Join(packages, " "), err, out)
	}
	return output(`(\S+)`, found...)
}

// output returns the match of a pattern in the output of a command.
func output(pattern string, argv ...string) (string, error) {
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	if found := regexp.MustCompile(pattern).FindSubmatch(out); len(found) > 1 {
		return string(found[1]), nil
	}
	return "", nil
}
