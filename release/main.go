// Command release packs a binary of Caddy with openai_lb as users get it: an
// archive with the docs, the examples and the licences of everything in the
// binary, and next to it a list of these contents (SBOM). Equal input gives
// equal bytes, wherever and whenever it runs.
//
//	release -binary caddy -version v0.1.0 -time 1790000000 -modcache "$(go env GOMODCACHE)" -goroot "$(go env GOROOT)" -to dist
//
// release/build calls it for each platform.
package main

import (
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"
)

// root is the path of the module that is released.
const root = "github.com/openai-lb/caddy-openai-lb"

// release is one binary to pack.
type release struct {
	name            string // of the archive, before its version and platform
	binary, version string
	modcache        string // with every module in the binary, unpacked
	goroot          string
	time            time.Time // of every file in the archive
	to              string    // the folder for the archive and the SBOM
}

func main() {
	var r release
	flag.StringVar(&r.name, "name", "caddy-openai-lb", "the name of the archive, before its version and platform")
	flag.StringVar(&r.binary, "binary", "", "the binary to pack")
	flag.StringVar(&r.version, "version", "", "the version of openai_lb that the binary must have, v0.1.0")
	flag.StringVar(&r.modcache, "modcache", "", "the module cache that it was built from")
	flag.StringVar(&r.goroot, "goroot", "", "the root of the Go that built it")
	flag.StringVar(&r.to, "to", "dist", "the folder for the archive and the SBOM")
	seconds := flag.Int64("time", 0, "the time of every file in the archive, in seconds since 1970")
	flag.Parse()
	r.time = time.Unix(*seconds, 0).UTC()
	if err := r.pack(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// pack writes the archive and the SBOM of the binary.
func (r release) pack() error {
	info, err := buildinfo.ReadFile(r.binary)
	if err != nil {
		return err
	}
	program, err := os.ReadFile(r.binary)
	if err != nil {
		return err
	}
	if got := versionIn(info); got != r.version {
		return fmt.Errorf("%s has %s %s, expected %s", r.binary, root, got, r.version)
	}
	files, err := r.contents(info)
	if err != nil {
		return err
	}
	bill, err := r.bill(info, program)
	if err != nil {
		return err
	}
	system, suffix, executable := setting(info, "GOOS"), ".tar.gz", "caddy"
	write := writeTar
	if system == "windows" {
		suffix, executable, write = ".zip", "caddy.exe", writeZip
	}
	name := fmt.Sprintf("%s_%s_%s_%s", r.name, strings.TrimPrefix(r.version, "v"), system, setting(info, "GOARCH"))
	files = append(files, file{executable, 0o755, program})
	archive, err := os.Create(filepath.Join(r.to, name+suffix))
	if err != nil {
		return err
	}
	err = errors.Join(write(archive, name, files, r.time), archive.Close())
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.to, name+".cdx.json"), bill, 0o644)
}

// versionIn returns the version of openai_lb in a binary.
func versionIn(info *debug.BuildInfo) string {
	for _, m := range info.Deps {
		if m.Path == root && m.Replace == nil {
			return m.Version
		}
	}
	return "(none)"
}

// setting returns a setting that the binary was built with.
func setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
