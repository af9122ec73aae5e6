package upstreams

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// proxyAround returns the innermost reverse_proxy that the last of the modules is part
// of, or nil.
func proxyAround(modules []caddy.Module) *reverseproxy.Handler {
	for _, module := range slices.Backward(modules) {
		if proxy, ok := module.(*reverseproxy.Handler); ok {
			return proxy
		}
	}
	return nil
}

// checkUpstream refuses the dial address of an upstream that the proxy does not
// have. A proxy with dynamic upstreams may have any.
func checkUpstream(proxy *reverseproxy.Handler, dial string) error {
	if proxy == nil || proxy.DynamicUpstreamsRaw != nil || proxy.DynamicUpstreams != nil {
		return nil
	}
	var dials []string
	for _, u := range proxy.Upstreams {
		dials = append(dials, u.Dial)
	}
	if slices.Contains(dials, dial) {
		return nil
	}
	return fmt.Errorf("upstream '%s' is not one of reverse_proxy's upstreams: %s", dial, strings.Join(dials, ", "))
}

// hasSelection reports whether the proxy, which is being set up, has a Selection.
func hasSelection(proxy *reverseproxy.Handler) bool {
	if proxy == nil || proxy.LoadBalancing == nil {
		return false
	}
	return pools.PolicyName(proxy.LoadBalancing.SelectionPolicyRaw) == "openai_lb"
}

// checkRetries refuses the options with which the proxy would classify replies as well.
func checkRetries(proxy *reverseproxy.Handler) error {
	if proxy.LoadBalancing.RetryMatchRaw != nil {
		return errors.New("lb_retry_match is not allowed with the openai_lb transport, which classifies replies itself")
	}
	if option := passiveOption(proxy); option != "" {
		return fmt.Errorf("%s of reverse_proxy is not allowed with the openai_lb transport, because it would count each throttle as a failure: use the transport's own options", option)
	}
	return nil
}

// passiveOption returns the name of an option with which the proxy counts failures of
// its upstreams, or an empty string. unhealthy_request_count counts none.
func passiveOption(proxy *reverseproxy.Handler) string {
	if proxy.HealthChecks == nil || proxy.HealthChecks.Passive == nil {
		return ""
	}
	switch passive := proxy.HealthChecks.Passive; {
	case passive.FailDuration != 0:
		return "fail_duration"
	case passive.MaxFails != 0:
		return "max_fails"
	case passive.UnhealthyStatus != nil:
		return "unhealthy_status"
	case passive.UnhealthyLatency != 0:
		return "unhealthy_latency"
	}
	return ""
}
