package metrics

import (
	_ "embed"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
)

// module is the path of the balancer's Go module.
const module = "github.com/openai-lb/caddy-openai-lb"

// Version returns the version of the balancer in this build.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return versionIn(info)
	}
	return unknownVersion
}

// CaddyVersion returns the version of Caddy in this build.
func CaddyVersion() string {
	version, _ := caddy.Version()
	return version
}

// unknownVersion is Go's version of code that is built from a working tree.
const unknownVersion = "(devel)"

func versionIn(info *debug.BuildInfo) string {
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path != module {
			continue
		}
		if m.Replace != nil {
			m = m.Replace
		}
		if m.Version != "" {
			return m.Version
		}
	}
	return unknownVersion
}

// released has the version and the commit of the latest release.
// release/prepare writes it, because a build from a tag does not know the tag's
// commit.
//
//go:embed released.txt
var released string

// Commit returns the commit of this build. It is empty if that is unknown.
func Commit() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return commitIn(info, released)
	}
	return ""
}

var pseudoVersion = regexp.MustCompile(`[-.]\d{14}-([0-9a-f]{12})$`)

func commitIn(info *debug.BuildInfo, released string) string {
	version := versionIn(info)
	if commit, ok := strings.CutPrefix(released, version+" "); ok {
		return strings.TrimSpace(commit)
	}
	if info.Main.Path == module {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	if match := pseudoVersion.FindStringSubmatch(version); match != nil {
		return match[1]
	}
	return ""
}

// build is always 1. Its labels are the versions that run.
var build = prometheus.NewGaugeFunc(prometheus.GaugeOpts{
	Namespace: namespace, Subsystem: subsystem, Name: "build_info",
	Help:        "Always 1: the version of openai_lb, and that of Caddy.",
	ConstLabels: prometheus.Labels{"version": Version(), "caddy_version": CaddyVersion()},
}, func() float64 { return 1 })
