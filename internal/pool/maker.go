package pool

import "time"

// Maker is for a request that makes an object: it chooses the account, among
// members that are as good as each other, so that the objects of one caller are
// in one account.
type Maker struct {
	// Home is the account where the caller's objects are, and Last the one of
	// what it began last. They are empty if that is not known.
	Home, Last string
	// Order is the key of the order of the other accounts, in which each is
	// first for its share of the keys. 0: the request goes home only as long as
	// that has room, as a prompt with a key does, and else to any member.
	Order uint64
	// Chosen reports whether the latest pick was by account.
	Chosen bool
}

// soon is how long a request for an account that throttles may be told to wait
// at most.
const soon = time.Minute

// IsSoonBack reports whether an account throttles or is full, is back soon, and
// would else be as good as any for the request.
func (p *Pool) IsSoonBack(r *Ask, account string, now time.Time) (back bool) {
	var best *Member // of other accounts, among those that may be called
	for _, m := range p.Members {
		at := &r.At[m.Index]
		if !at.takes() || m.Drained() || m.Unreachable() {
			continue
		}
		away := m.Full() || m.Throttles(r, now)
		switch {
		case m.Account != account:
			if best == nil && !away && r.mayTry(at) {
				best = m
			}
		case !away:
			return false
		case best == nil || best.Priority >= m.Priority:
			back = back || m.returns(r, now).Sub(now) < soon
		}
	}
	return back
}

// account is what the members of one account have in common.
type account struct {
	name   string
	digest digest
	// weight is the sum of the configured weights of its members of one
	// priority.
	weight float64
}

func (p *Pool) findAccounts() {
	for _, m := range p.Members {
		m.account = account{name: m.Account, digest: digestOf(m.Account)}
		for _, other := range p.Members {
			if other.Account == m.Account && other.Priority == m.Priority {
				m.account.weight += other.configuredShare()
			}
		}
	}
}

// score returns the place of an account in the maker's order: the lowest comes
// first. ok is false if it has none.
func (k *Maker) score(a *account, weight float64) (score float64, ok bool) {
	switch {
	case a.name == k.Home:
		return -2, true
	case k.Order == 0:
		return 0, false
	case a.name == k.Last:
		return -1, true
	}
	return a.digest.score(k.Order, weight), true
}

// chooseForMaker chooses the first account in the maker's order that has a
// member which is as good as the one chosen, and one of its members by weight.
// It returns nil if the choice is free.
func (p *Pool) chooseForMaker(r *Ask, k *Maker, now time.Time, best grade) (chosen *Member) {
	var t tier
	var account string
	var lowest float64
	for m := range p.tier(best, r, now) {
		t.weights += r.share(m)
		t.inFlight += m.InFlight()
		if score, ok := k.score(&m.account, r.accountShare(m)); ok && (account == "" || score < lowest) {
			account, lowest = m.Account, score
		}
	}
	total := 0.0
	for m := range p.tier(best, r, now) {
		if m.Account != account || account == "" || k.Order == 0 && !t.place(r, m).hasRoom() {
			continue
		}
		if total += r.share(m); chosen == nil || Random()*total < r.share(m) {
			chosen = m
		}
	}
	k.Chosen = chosen != nil
	return chosen
}
