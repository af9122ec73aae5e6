package tools

import (
	"cmp"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
)

// measures are the fields by which LiteLLM shares requests, in the order in
// which it looks for them.
var measures = [...]string{"weight", "rpm", "tpm"}

// setBlocks makes a backend of each endpoint, key and priority.
func (l *litellm) setBlocks() {
	ranks := l.ranks()
	l.setWeights(ranks)
	slices.SortStableFunc(l.deployments, func(a, b *deployment) int { return cmp.Compare(ranks[a], ranks[b]) })
	for _, d := range l.deployments {
		if ranks[l.deployments[len(l.deployments)-1]] > 1 {
			d.priority = ranks[d]
		}
		i := slices.IndexFunc(l.blocks, func(b *block) bool { return b.canServe(d) })
		if i < 0 {
			i = len(l.blocks)
			l.blocks = append(l.blocks, new(d.block))
		}
		b, model := l.blocks[i], [2]string{d.model, d.backendModel}
		switch {
		case d.wildcard:
		case !slices.Contains(b.models, model):
			b.models = append(b.models, model)
		case !d.copied:
			l.note(d.line, "model "+shown(d.model)+" is in the file twice for one endpoint, and here once")
		}
	}
	l.setNames()
}

// setNames names the backends of a URL that has several by their keys: by
// default, logs and metrics have the host.
func (l *litellm) setNames() {
	count := make(map[string]int)
	for _, b := range l.blocks {
		count[b.url]++
	}
	taken := make(map[string]bool)
	for _, b := range l.blocks {
		match := usedVariable.FindStringSubmatch(b.key)
		if count[b.url] == 1 || match == nil {
			continue
		}
		name := strings.ReplaceAll(strings.ToLower(match[1]), "_", "-")
		if taken[name] { // such as for a fallback
			name += "-priority-" + strconv.Itoa(max(b.priority, 1))
		}
		b.name = take(taken, name, "-")
	}
}

// canServe reports whether a backend can also serve a deployment. In LiteLLM,
// max_parallel_requests is of one model.
func (b *block) canServe(d *deployment) bool {
	return b.url == d.url && b.auth == d.auth && b.key == d.key && slices.Equal(b.header, d.header) &&
		b.priority == d.priority && b.weight == d.weight && b.requests == d.requests &&
		(len(b.models) == 0) == d.wildcard &&
		!slices.ContainsFunc(b.models, func(m [2]string) bool {
			return m[0] == d.model && m[1] != d.backendModel || b.requests > 0 && m[1] != d.backendModel
		})
}

// setWeights sets the weights of all deployments, as LiteLLM's simple-shuffle
// shares requests among deployments of a model and an order:
// https://github.com/BerriAI/litellm/blob/main/litellm/router_strategy/simple_shuffle.py
// The first deployment decides by which measure. Deployments without that get
// nothing while another one is healthy.
func (l *litellm) setWeights(ranks map[*deployment]int) {
	type level struct {
		model string
		rank  int
	}
	levels := make(map[level][]*deployment)
	for _, d := range l.deployments {
		at := level{d.model, ranks[d]}
		levels[at] = append(levels[at], d)
	}
	for _, d := range l.deployments {
		all := levels[level{d.model, ranks[d]}]
		switch {
		case !l.unweighted && all[0] == d && len(all) > 1:
			l.shareAmong(all)
		case l.unweighted && d.shares[0] >= 0 && !d.copied:
			l.note(d.line, "weight: LiteLLM ignores it with this routing_strategy")
		}
	}
}

// shareAmong sets the weights of deployments that share the requests of a
// model.
func (l *litellm) shareAmong(all []*deployment) {
	for i, measure := range measures {
		var values []float64
		for _, d := range all {
			values = append(values, max(d.shares[i], 0))
		}
		if all[0].shares[i] < 0 || slices.Max(values) == 0 {
			continue
		}
		for j, n := range wholeWeights(values) {
			d := all[j]
			if d.weight = strconv.Itoa(n); d.shares[i] < 0 && !d.copied {
				l.note(d.line, "model "+shown(d.model)+": it has no "+measure+", as the first one of the model has, so LiteLLM sends it nothing while that one is healthy: weight 0")
			}
		}
		return
	}
}

// wholeWeights returns the smallest whole numbers that have the proportions of
// values, at most [backend.MaxWeight].
func wholeWeights(values []float64) []int {
	scale := 1.0
	for _, v := range values {
		for scale < 1_000_000 && math.Abs(v*scale-math.Round(v*scale)) > 1e-6 {
			scale *= 10
		}
	}
	divisor := new(big.Int)
	for _, v := range values {
		divisor.GCD(nil, nil, divisor, big.NewInt(int64(math.Round(v*scale))))
	}
	scale = min(scale/float64(max(divisor.Int64(), 1)), backend.MaxWeight/slices.Max(values))
	weights := make([]int, len(values))
	for i, v := range values {
		if weights[i] = int(math.Round(v * scale)); v > 0 {
			weights[i] = max(weights[i], 1)
		}
	}
	return weights
}

// ranks returns the priorities. As in LiteLLM, deployments without an order
// come after those of their group that have one, and patterns after all names.
func (l *litellm) ranks() map[*deployment]int {
	lowest, highest := maxOrder, 0
	hasOrder := make(map[string]bool)
	for _, d := range l.deployments {
		if d.ordered {
			lowest, highest = min(lowest, d.order), max(highest, d.order)
			hasOrder[d.model] = true
		}
	}
	shift := max(0, 1-lowest)
	ranks, last := make(map[*deployment]int), 0
	for _, d := range l.deployments {
		switch ranks[d] = 1; {
		case d.ordered:
			ranks[d] = d.order + shift
		case hasOrder[d.model]:
			ranks[d] = highest + shift + 1
		}
		if !d.wildcard {
			last = max(last, ranks[d])
		}
	}
	for _, d := range l.deployments {
		if d.wildcard {
			ranks[d] += last
		}
	}
	return ranks
}

// levels returns how many priorities the model with the most has.
func (l *litellm) levels() int {
	ranks := l.ranks()
	most := 1
	seen := make(map[string]map[int]bool)
	for _, d := range l.deployments {
		if seen[d.model] == nil {
			seen[d.model] = make(map[int]bool)
		}
		seen[d.model][ranks[d]] = true
		most = max(most, len(seen[d.model]))
	}
	return most
}
