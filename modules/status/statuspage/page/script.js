'use strict';
(() => {
	const main = document.getElementById('state');
	const live = document.getElementById('live');
	const clock = document.getElementById('time');
	const news = document.getElementById('news');
	const words = {yes: 'Updating', wait: 'Connecting', lost: 'No updates'};
	let ahead = main.dataset.now - Date.now(); // how much the server's clock is
	const still = matchMedia('(prefers-reduced-motion: reduce)').matches; // the bars then move once a second
	let heard = 0;
	let told = '', toldAt = 0;
	let source = null, again = 0;

	// left says how long something lasts.
	function left(ms) {
		const s = Math.ceil(ms / 1000);
		if (s <= 0) return 'due now';
		if (s < 100) return s + ' s left';
		return Math.floor(s / 60) + ' min ' + String(s % 60).padStart(2, '0') + ' s left';
	}

	// next says when a backend that cannot be reached is tried again.
	function next(ms) {
		return ms <= 1000 ? 'next try now' : 'next try in ' + Math.ceil(ms / 1000) + ' s';
	}

	function tick() {
		const now = Date.now() + ahead;
		for (const e of main.querySelectorAll('.left')) {
			const text = 'next' in e.dataset ? next(e.dataset.until - now) : left(e.dataset.until - now);
			if (e.textContent !== text) e.textContent = text;
		}
		for (const e of main.querySelectorAll('.rest')) {
			const part = (e.dataset.until - now) / (e.dataset.until - e.dataset.since);
			e.setAttribute('width', (100 * Math.min(1, Math.max(0, part))).toFixed(1));
		}
		if (heard && Date.now() - heard > 25000) show('lost');
	}

	// become makes a node like another one, and touches only what differs: who
	// reads or selects something is not disturbed.
	function become(node, next) {
		if (node.nodeType !== next.nodeType || node.nodeName !== next.nodeName) {
			node.replaceWith(next);
			return;
		}
		if (node.nodeType === Node.TEXT_NODE) {
			if (node.data !== next.data) node.data = next.data;
			return;
		}
		for (const {name} of [...node.attributes]) {
			if (!next.hasAttribute(name)) node.removeAttribute(name);
		}
		for (const {name, value} of next.attributes) {
			if (node.getAttribute(name) !== value) node.setAttribute(name, value);
		}
		if (node.className === 'left') return; // tick writes it
		const olds = [...node.childNodes], nexts = [...next.childNodes];
		nexts.forEach((n, i) => (i < olds.length ? become(olds[i], n) : node.append(n)));
		olds.slice(nexts.length).forEach((n) => n.remove());
	}

	// announce tells a screen reader how the backends are, but not all the time.
	function announce() {
		const text = [...main.querySelectorAll('section')].map((s) =>
			s.querySelector('h2').textContent + ': ' + s.querySelector('.summary').textContent).join(' ');
		if (text === told || Date.now() - toldAt < 20000) return;
		if (told) news.textContent = text;
		told = text;
		toldAt = Date.now();
	}

	function show(state) {
		live.dataset.live = state;
		if (live.textContent !== words[state]) live.textContent = words[state];
	}

	function hear(event) {
		heard = Date.now();
		ahead = event.lastEventId - heard;
		clock.textContent = new Date(+event.lastEventId).toISOString().slice(11, 19) + ' UTC';
		show('yes');
	}

	// The search is outside of what changes, and starts the stream anew with what it has found.
	const find = document.getElementById('find'), search = document.getElementById('search');
	const address = () => (search ? '?callers' + (search.value ? '&search=' + encodeURIComponent(search.value) : '') : '?');
	let typed = 0;
	function look() {
		history.replaceState(null, '', address());
		toldAt = 0;
		disconnect();
		connect();
	}
	if (find) {
		search.addEventListener('input', () => {
			clearTimeout(typed);
			typed = setTimeout(look, 250);
		});
		find.addEventListener('submit', (event) => {
			if (source.readyState === EventSource.CLOSED) return; // too many watch: it is another page
			event.preventDefault();
			clearTimeout(typed);
			look();
		});
	}

	function connect() {
		clearTimeout(again);
		source = new EventSource(address() + '&events');
		source.addEventListener('beat', hear);
		let lines = []; // of the state
		function take(event) {
			hear(event);
			const next = main.cloneNode(false);
			next.innerHTML = lines.join('\n');
			become(main, next);
			tick();
			announce();
		}
		source.addEventListener('state', (event) => {
			lines = JSON.parse(event.data).split('\n');
			take(event);
		});
		source.addEventListener('change', (event) => {
			for (const [first, number, instead] of JSON.parse(event.data)) {
				lines = lines.slice(0, first).concat(instead, lines.slice(first + number));
			}
			take(event);
		});
		source.onerror = () => {
			show('lost');
			if (source.readyState === EventSource.CLOSED) again = setTimeout(connect, 10000);
		};
	}

	function disconnect() {
		clearTimeout(again);
		if (source) source.close();
		heard = 0;
		show('wait');
	}

	document.addEventListener('visibilitychange', () => (document.hidden ? disconnect() : connect()));
	setInterval(tick, still ? 1000 : 100);
	show('wait');
	tick();
	if (!document.hidden) connect();
})();
