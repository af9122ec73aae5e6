// Watches the status page in a desktop's and in a phone's browser while a
// backend is benched and comes back, and prints what it saw.
//
//	node status.mjs <chromium> <url> <backend> <folder for screenshots>
import axe from 'axe-core';
import {chromium} from 'playwright-core';

const [executablePath, url, backend, folder] = process.argv.slice(2);
const patience = 60_000;

const browser = await chromium.launch({
	executablePath,
	// nothing but the page: Chromium's own connections would fail, and take time
	args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
		'--disable-component-update', '--disable-sync'],
});

// states is how the backend's row is shown, each state with what is left of its bench.
const record = (name) => {
	const seen = (window.seen = []);
	const look = () => {
		const row = [...document.querySelectorAll('tr[data-backend]')].find((r) => r.dataset.backend === name);
		if (!row) return;
		const badge = row.querySelector('.badge').textContent.trim();
		const left = row.querySelector('.left')?.textContent ?? '';
		const last = seen.at(-1);
		if (last?.badge !== badge || last.left !== left) seen.push({badge, left});
	};
	new MutationObserver(look).observe(document.getElementById('state'), {subtree: true, childList: true, attributes: true, characterData: true});
	look();
};

async function problems(page) {
	const results = await page.evaluate(`${axe.source}; axe.run()`);
	return results.violations.map((v) => `${v.impact}: ${v.id}: ${v.nodes.map((n) => n.html).join(' ').slice(0, 300)}`);
}

async function watch(name, options) {
	const context = await browser.newContext(options);
	const page = await context.newPage();
	const report = {name, errors: [], elsewhere: [], problems: []};
	page.on('pageerror', (e) => report.errors.push(e.message));
	page.on('console', (m) => m.type() === 'error' && report.errors.push(m.text()));
	page.on('request', (r) => {
		const to = r.url().split('?')[0];
		if (to !== url && !to.startsWith('data:')) report.elsewhere.push(r.url());
	});
	await page.goto(url);
	await page.evaluate(record, backend);
	const row = page.locator(`tr[data-backend="${backend}"]`);
	await page.locator('#live[data-live=yes]').waitFor({timeout: patience});
	for (const state of ['benched', 'available']) {
		await row.and(page.locator(`[data-state=${state}]`)).waitFor({timeout: patience});
		await page.screenshot({path: `${folder}/${name}-${state}.png`, fullPage: true});
		report.problems.push(...(await problems(page)));
	}
	report.seen = await page.evaluate(() => window.seen);
	report.sideways = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
	report.live = await page.locator('#live').textContent();
	await context.close();
	return report;
}

// plain is the page without JavaScript.
async function plain() {
	const context = await browser.newContext({viewport: {width: 1280, height: 900}, javaScriptEnabled: false});
	const page = await context.newPage();
	await page.goto(url);
	await page.screenshot({path: `${folder}/plain.png`, fullPage: true});
	const cells = await page.locator('tr[data-backend] th').allTextContents();
	await context.close();
	return cells;
}

const phone = {width: 375, height: 812}, desktop = {width: 1280, height: 900};
const watched = await Promise.all([
	watch('desktop', {viewport: desktop, colorScheme: 'light'}),
	watch('desktop-dark', {viewport: desktop, colorScheme: 'dark', reducedMotion: 'reduce'}),
	watch('phone', {viewport: phone, colorScheme: 'light', hasTouch: true, isMobile: true}),
	watch('phone-dark', {viewport: phone, colorScheme: 'dark', hasTouch: true, isMobile: true}),
]);
console.log(JSON.stringify({watched, plain: await plain()}));
await browser.close();
