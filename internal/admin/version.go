package admin

import "runtime/debug"

// module is the path of the module that the balancer is in.
const module = "github.com/openai-lb/caddy-openai-lb"

// Version returns the version of the balancer in this build.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return versionIn(info)
	}
	return unknownVersion
}

// unknownVersion is Go's word for the version of code that is built where it is edited.
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
