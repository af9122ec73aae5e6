package metrics

import (
	"runtime/debug"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestTheVersionIsThatOfTheModule(t *testing.T) {
	ours := func(version string, replace *debug.Module) *debug.Module {
		return &debug.Module{Path: module, Version: version, Replace: replace}
	}
	for want, info := range map[string]debug.BuildInfo{
		"v0.3.0":  {Main: debug.Module{Path: "caddy", Version: "v9.9.9"}, Deps: []*debug.Module{{Path: module + "/redis", Version: "v8.8.8"}, ours("v0.3.0", nil)}},
		"v0.4.0":  {Deps: []*debug.Module{ours("v0.3.0", &debug.Module{Path: "github.com/a/fork", Version: "v0.4.0"})}},
		"(devel)": {Deps: []*debug.Module{ours("v0.3.0", &debug.Module{Path: "../caddy-openai-lb"})}},
		"v0.5.0":  {Main: *ours("v0.5.0", nil)},
	} {
		if got := versionIn(&info); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	if Version() == "" {
		t.Error("this build has no version")
	}
}

func TestTheCommitIsThatOfTheBuild(t *testing.T) {
	const released = "v0.3.0 0123456789abcdef0123456789abcdef01234567\n"
	of := func(version string) debug.BuildInfo {
		return debug.BuildInfo{Main: debug.Module{Path: "caddy"}, Deps: []*debug.Module{{Path: module, Version: version}}}
	}
	clone := debug.BuildInfo{Main: debug.Module{Path: module, Version: "(devel)"}, Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "fedcba"}}}
	others := of("v0.4.0")
	others.Settings = clone.Settings
	for _, c := range []struct {
		info debug.BuildInfo
		want string
	}{
		{of("v0.3.0"), "0123456789abcdef0123456789abcdef01234567"},
		{of("v0.3.1"), ""}, // the file is that of an earlier release
		{of("v0.3.1-0.20261125164124-0965721abcde"), "0965721abcde"},
		{of("v0.0.0-20261125164124-0965721abcde"), "0965721abcde"},
		{of("(devel)"), ""},
		{clone, "fedcba"},
		{others, ""}, // that of another program
	} {
		if got := commitIn(&c.info, released); got != c.want {
			t.Errorf("%s: got %q, want %q", versionIn(&c.info), got, c.want)
		}
	}
}

func TestAMetricHasTheVersion(t *testing.T) {
	registry := prometheus.NewRegistry()
	if err := Register(registry); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != "caddy_openai_lb_build_info" {
			continue
		}
		labels := make(map[string]string)
		for _, label := range family.GetMetric()[0].GetLabel() {
			labels[label.GetName()] = label.GetValue()
		}
		if labels["version"] != Version() || labels["caddy_version"] != CaddyVersion() || family.GetMetric()[0].GetGauge().GetValue() != 1 {
			t.Errorf("got %v", family)
		}
		return
	}
	t.Error("there is no caddy_openai_lb_build_info")
}
