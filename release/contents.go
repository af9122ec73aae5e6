package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"golang.org/x/mod/module"
)

// modules returns the modules in a binary. The main module is not among them:
// xcaddy generates it.
func modules(info *debug.BuildInfo) (all []*debug.Module) {
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		all = append(all, m)
	}
	return all
}

// folder returns where the module cache has a module.
func (r release) folder(m *debug.Module) (string, error) {
	path, err := module.EscapePath(m.Path)
	if err != nil {
		return "", err
	}
	version, err := module.EscapeVersion(m.Version)
	return filepath.Join(r.modcache, filepath.FromSlash(path)+"@"+version), err
}

var (
	// own are the files of openai_lb in the archive.
	own = regexp.MustCompile(`^(LICENSE|(README|CHANGELOG|SECURITY)\.md|(docs|examples)/.+)$`)
	// licence are the names of files that say under which terms code may be
	// used.
	licence = regexp.MustCompile(`(?i)^(licen[cs]es?|copying|copyright|notices?|unlicense|patents|third.?party.*)([-._].*)?$`)
	// noLicence are endings of files that only look so: code.
	noLicence = regexp.MustCompile(`(?i)\.(go|s|c|h|tmpl|sh|py|json|ya?ml|csv|toml)$`)
)

// contents returns the files of the archive next to the binary: those of
// openai_lb that users need, and the licences of every module in the binary.
func (r release) contents(info *debug.BuildInfo) (files []file, err error) {
	for _, m := range modules(info) {
		folder, err := r.folder(m)
		if err != nil {
			return nil, err
		}
		found, err := read(folder, isLicence)
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%s %s has no licence", m.Path, m.Version)
		}
		for _, f := range found {
			f.name = "licences/" + m.Path + "@" + m.Version + "/" + f.name
			files = append(files, f)
		}
		if m.Path == root {
			found, err := read(folder, own.MatchString)
			if err != nil {
				return nil, err
			}
			files = append(files, found...)
		}
	}
	text, err := os.ReadFile(filepath.Join(r.goroot, "LICENSE"))
	return append(files, file{"licences/" + info.GoVersion + "/LICENSE", 0o644, text}), err
}

// isLicence reports whether a file of a module is a licence of its code, which
// is not only what its tests read.
func isLicence(name string) bool {
	base := name[strings.LastIndex(name, "/")+1:]
	return licence.MatchString(base) && !noLicence.MatchString(base) &&
		!strings.Contains("/"+name, "/testdata/") && !strings.Contains("/"+name, "/node_modules/")
}

// read returns the files below a folder for whose names keep returns true.
func read(folder string, keep func(name string) bool) (files []file, err error) {
	err = fs.WalkDir(os.DirFS(folder), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || !keep(name) {
			return err
		}
		data, err := os.ReadFile(filepath.Join(folder, filepath.FromSlash(name)))
		// The module cache has lost which files are executable: scripts begin
		// with #!.
		mode := uint32(0o644)
		if bytes.HasPrefix(data, []byte("#!")) {
			mode = 0o755
		}
		files = append(files, file{name, mode, data})
		return err
	})
	return files, err
}

// bill returns the list of the binary's contents, in the format of CycloneDX.
// As in those of cyclonedx-gomod, the hash of a module is its checksum in
// go.sum.
func (r release) bill(info *debug.BuildInfo, program []byte) ([]byte, error) {
	sum := sha256.Sum256(program)
	bom := cdx.NewBOM()
	bom.SerialNumber = "urn:uuid:" + uuid(sum)
	version := strings.TrimPrefix(r.version, "v")
	subject := &cdx.Component{
		BOMRef: "pkg:golang/" + root + "@" + r.version + "#caddy", Type: cdx.ComponentTypeApplication,
		Name: "caddy-openai-lb", Version: version,
		Description: fmt.Sprintf("Caddy with openai_lb for %s on %s", setting(info, "GOOS"), setting(info, "GOARCH")),
		Hashes:      &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	}
	var settings []cdx.Property
	for _, s := range info.Settings {
		settings = append(settings, cdx.Property{Name: "go:build:" + s.Key, Value: s.Value})
	}
	subject.Properties = &settings
	bom.Metadata = &cdx.Metadata{Timestamp: r.time.Format(time.RFC3339), Component: subject}
	compiler := strings.TrimPrefix(info.GoVersion, "go")
	components := []cdx.Component{{
		BOMRef: "pkg:golang/std@" + compiler, Type: cdx.ComponentTypeLibrary, Name: "std", Version: compiler,
		PackageURL: "pkg:golang/std@" + compiler,
	}}
	for _, m := range modules(info) {
		purl := "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")
		checksum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
		if err != nil || len(checksum) != sha256.Size {
			return nil, fmt.Errorf("%s %s has no checksum", m.Path, m.Version)
		}
		components = append(components, cdx.Component{
			BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: purl,
			Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(checksum)}},
		})
	}
	bom.Components = &components
	var refs []string
	for _, c := range components {
		refs = append(refs, c.BOMRef)
	}
	bom.Dependencies = &[]cdx.Dependency{{Ref: subject.BOMRef, Dependencies: &refs}}
	var text bytes.Buffer
	err := cdx.NewBOMEncoder(&text, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6)
	return text.Bytes(), err
}

// uuid returns a UUID (version 8: any bytes) that follows from a digest.
func uuid(digest [sha256.Size]byte) string {
	u := digest[:16]
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
